"""The rows of a sparse attention's indexer: which positions a token attends to, layer by layer; their spec and bytes.

A row has, for one token, ``[layers, k]`` int32: of each layer that has an indexer of its own, the chosen positions of
the sequence, *increasing*, then -1. Attention sums over the chosen positions, so their order is none of a row's
content, and rows do not keep it: :func:`canonical` sorts. Layers that share an earlier layer's choice (IndexShare) have
no row of their own; ``sources`` of the spec says whose they use.

Outside memory rows are packed, losslessly. All integers are little endian:

| bytes | what |
|---:|---|
| 8 | ``KVROUTEI`` |
| 4, 4, 4 | version 1; layers; k |
| 8, 8 | tokens; wide gaps |
| 16 | XXH3-128 of the 36 bytes before and of all that follows |
| 4 each | of each of the ``tokens * layers`` choices: how many positions, plus 2^31 if they lie side by side |
| 4 each | of each choice: its first position |
| 1 each | of each choice whose positions do not lie side by side, in order: its gaps, one less than positions |
| 12 each | the wide gaps: where among the gaps, and by how much more than its byte says |

A gap is the number of positions that are skipped between two. Of a wide one, of 255 or more, the byte is 255.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from cache_manager.errors import RowError, SpecError
from cache_manager.record import Buffer
from cache_manager.slots import integers
from cache_manager.spec import AuxBlockDataSpec

INDEXER: Final = "indexer_topk"
"""The name of the spec that :func:`indexer_spec` makes."""
NONE: Final = -1
"""Fills a choice of fewer than ``k`` positions."""
INDEXER_MAGIC: Final = b"KVROUTEI"
INDEXER_VERSION: Final = 1
PACKED_AT_ONCE: Final = 32
"""Choices that are packed at once: so many stay in a core's cache."""
INDEXER_ROWS_MAX: Final = 1 << 31
_GAP_END: Final = (1 << 31) - 1
"""Gaps are below this: from position 0 to the last one that int32 has."""
_INDEXER_HEAD: Final = struct.Struct("<8sIIIQQ")
_SUM_NBYTES: Final = 16
_HEADER_NBYTES: Final = _INDEXER_HEAD.size + _SUM_NBYTES
_BESIDE: Final = 1 << 31
_WIDE: Final = 255
INDEXER_NBYTES_MAX: Final = 1 << 32
"""Rows of more bytes are not unpacked unless the caller says so."""
_WIDE_GAP: Final = np.dtype([("place", "<u8"), ("more", "<u4")])


def indexer_spec(top_k: int, sources: ArrayLike, block_tokens: int) -> AuxBlockDataSpec:
    """The spec of rows ``[layers, top_k]`` int32. ``sources[l]`` is the layer whose choice layer ``l`` uses: itself, if
    it has an indexer of its own; -1 for a layer without sparse attention.

    Raises :class:`SpecError` for a source that has no indexer or comes later.

    >>> spec = indexer_spec(4, sources=[0, 0, 2, 2, -1], block_tokens=16)
    >>> spec.row_shape, spec.attrs["layer_ids"]
    ((2, 4), (0, 2))
    """
    wanted = "one integer for each layer"
    numbers = integers(sources, "sources", wanted, error=SpecError)
    own_sources: tuple[int, ...] = tuple(numbers.tolist())
    for layer, source in enumerate(own_sources):
        if source == NONE:
            continue
        if not 0 <= source <= layer or own_sources[source] != source:
            wanted = "this layer, or an earlier one that has an indexer"
            raise SpecError(f"sources[{layer}]", wanted, source)
    layer_ids = tuple(layer for layer, source in enumerate(own_sources) if layer == source)
    if not layer_ids:
        wanted = "at least one layer with an indexer of its own"
        raise SpecError("sources", wanted, "none")
    attrs = {"layer_ids": layer_ids, "sources": own_sources}
    shape = (len(layer_ids), top_k)
    return AuxBlockDataSpec(INDEXER, shape, "int32", block_tokens, attrs=attrs)


def indexer_spec_from_hf(config: Any, block_tokens: int) -> AuxBlockDataSpec:
    """The spec of a transformers configuration, an object or a mapping: ``index_topk``, and which layers share a choice
    by ``indexer_types`` (``full`` or ``shared``; by default all are ``full``).

    :class:`SpecError` for a model without an indexer.
    """
    names = ("index_topk", "num_hidden_layers", "indexer_types")
    if isinstance(config, Mapping):
        top_k, layers, kinds = (config.get(name) for name in names)
    else:
        top_k, layers, kinds = (getattr(config, name, None) for name in names)
    if not top_k or not layers:
        raise SpecError("config index_topk", "a model with an indexer", "none")
    kinds = ["full"] * layers if kinds is None else kinds
    is_known = len(kinds) == layers and set(kinds) <= {"full", "shared"}
    if not is_known or kinds[0] != "full":
        wanted = f"{layers} times full or shared, the first full"
        raise SpecError("config indexer_types", wanted, kinds)
    sources: list[int] = []
    for layer, kind in enumerate(kinds):
        sources.append(layer if kind == "full" else sources[-1])
    return indexer_spec(top_k, sources, block_tokens)


def canonical(
    choices: ArrayLike,
    positions: ArrayLike,
    top_k: int,
) -> NDArray[np.int32]:
    """Rows ``[tokens, layers, top_k]`` of what indexers chose, ``[tokens, layers, up to top_k]`` in any order.

    ``positions`` ``[tokens]`` are the tokens' own: an indexer fills up with positions behind its token, and with
    negative numbers, which attention masks; they are none of a row. :class:`RowError` for a position that comes twice.
    """
    array = np.asarray(choices)
    own = integers(positions, "positions", "integers [tokens]", error=RowError)
    behind = np.iinfo(np.int32).max
    if (own >= behind).any():
        raise RowError("positions", f"below {behind}", int(own.max()))
    fits = array.ndim == 3 and array.shape[2] <= top_k and len(array) == len(own)
    if not fits or array.dtype.kind not in "iu":
        wanted = f"integers [{len(own)}, layers, up to {top_k}]"
        got = f"{array.dtype} {list(array.shape)}"
        raise RowError("choices", wanted, got)
    tokens, layers, chosen = array.shape
    is_masked = (array < 0) | (array > own[:, None, None])
    rows = np.full((tokens, layers, top_k), behind, np.int32)
    rows[:, :, :chosen] = np.where(is_masked, behind, array)
    rows.sort(axis=2)
    later = rows[:, :, 1:]
    twice = (rows[:, :, :-1] == later) & (later != behind)
    if twice.any():
        token, layer, place = (int(i) for i in np.argwhere(twice)[0])
        wanted = "distinct positions"
        raise RowError(f"choices of token {token} layer {layer}", wanted, int(rows[token, layer, place]))
    rows[rows == behind] = NONE
    return rows


def of_layers(
    spec: AuxBlockDataSpec,
    rows: NDArray[np.int32],
    layers: ArrayLike,
) -> NDArray[np.int32]:
    """The choices ``[tokens, len(layers), k]`` that these layers of the model use, shared ones too.

    :class:`RowError` names a layer without sparse attention.
    """
    sources = spec.attrs["sources"]
    layer_ids = spec.attrs["layer_ids"]
    columns = list[int]()
    for layer in integers(layers, "layers", "integers", error=RowError).tolist():
        if not 0 <= layer < len(sources) or sources[layer] == NONE:
            wanted = f"one with sparse attention, of {len(sources)}"
            raise RowError(f"layer {layer}", wanted, "another")
        columns.append(layer_ids.index(sources[layer]))
    chosen: NDArray[np.int32] = rows[:, columns]
    return chosen


def pack(rows: NDArray[np.int32]) -> bytes:
    """The bytes of ``rows`` ``[tokens, layers, k]``, canonical: :func:`unpack` returns them.

    :class:`RowError` names the first token and layer whose positions do not increase, or are not followed by -1.
    """
    array = np.asarray(rows)
    if array.ndim != 3 or array.dtype != np.int32 or 0 in array.shape[1:]:
        wanted = "int32 [tokens, layers, k]"
        got = f"{array.dtype} {list(array.shape)}"
        raise RowError("indexer rows", wanted, got)
    tokens, layers, k = array.shape
    flat = np.ascontiguousarray(array).reshape(-1, k)
    counts = np.full(len(flat), k, np.int64)
    short = np.flatnonzero(flat[:, -1] < 0)
    counts[short] = np.count_nonzero(flat[short] >= 0, axis=1)
    first = flat[:, 0].astype(np.int64)
    last_places = np.maximum(counts, 1) - 1
    last = flat[np.arange(len(flat)), last_places].astype(np.int64)
    beside = (last - first == counts - 1) | (counts == 0)
    _check_others(flat, counts, beside, layers)
    full = np.flatnonzero(~beside & (counts == k))
    ragged = np.flatnonzero(~beside & (counts < k))
    lengths = np.where(beside, 0, counts - 1)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    gaps = np.empty(int(starts[-1]), np.uint8)
    wide = list[NDArray[Any]]()
    for begin in range(0, len(full), PACKED_AT_ONCE):
        chosen = full[begin : begin + PACKED_AT_ONCE]
        are_neighbours = chosen[-1] - chosen[0] == len(chosen) - 1
        part = flat[chosen[0] : chosen[-1] + 1] if are_neighbours else flat[chosen]
        if part.min() < 0:  # a difference over 2^31 would look like a gap
            row = int((part < 0).any(axis=1).argmax())
            raise _not_canonical(int(chosen[row]), layers)
        own = (part[:, 1:] - part[:, :-1]).view(np.uint32)
        own -= 1  # one that does not increase becomes very wide
        over = np.flatnonzero(own.reshape(-1) >= _WIDE)
        if len(over):
            wide.append(_wide(own, over, starts[chosen], chosen, layers))
            own.reshape(-1)[over] = _WIDE
        place = int(starts[chosen[0]])
        whole_nbytes = (k - 1) * (len(chosen) - 1)
        if starts[chosen[-1]] - place == whole_nbytes:  # no choice that ends early lies between
            gaps[place : place + own.size].reshape(own.shape)[...] = own
        else:
            for own_gaps, start in zip(own, starts[chosen].tolist(), strict=True):
                gaps[start : start + k - 1] = own_gaps
    for choice in ragged.tolist():
        positions = flat[choice, : counts[choice]]
        own = np.diff(positions).view(np.uint32) - np.uint32(1)
        over = np.flatnonzero(own >= _WIDE)
        of_choice = np.array([choice])
        wide.append(_wide(own[None], over, starts[of_choice], of_choice, layers))
        gaps[starts[choice] : starts[choice + 1]] = np.minimum(own, _WIDE)
    extra = np.concatenate(wide) if wide else np.empty(0, _WIDE_GAP)
    if len(ragged):
        extra = extra[np.argsort(extra["place"], kind="stable")]
    head = counts.astype("<u4")
    head[beside] |= np.uint32(_BESIDE)
    firsts = first.astype("<i4")
    fixed = _INDEXER_HEAD.pack(
        INDEXER_MAGIC,
        INDEXER_VERSION,
        layers,
        k,
        tokens,
        len(extra),
    )
    body = b"".join((head.tobytes(), firsts.tobytes(), gaps.data, extra.tobytes()))
    return b"".join((fixed, _choices_sum(fixed, body), body))


def unpack(data: Buffer, *, nbytes_max: int = INDEXER_NBYTES_MAX) -> NDArray[np.int32]:
    """The rows ``[tokens, layers, k]`` that :func:`pack` was given, in new memory.

    :class:`RowError` for anything else, also if one bit has changed, and for rows of more than
    ``nbytes_max`` bytes, before memory is made for them: a few bytes may stand for many positions side by side.
    """
    view = memoryview(data).cast("B")
    if len(view) < _HEADER_NBYTES:
        raise RowError("indexer record", f"{_HEADER_NBYTES} bytes or more", len(view))
    fixed = view[: _INDEXER_HEAD.size]
    body = view[_HEADER_NBYTES:]
    magic, version, layers, k, tokens, wide = _INDEXER_HEAD.unpack(fixed)
    if (magic, version) != (INDEXER_MAGIC, INDEXER_VERSION):
        wanted = f"{INDEXER_MAGIC!r} version {INDEXER_VERSION}"
        raise RowError("indexer record", wanted, f"{magic!r} version {version}")
    stored_sum = bytes(view[_INDEXER_HEAD.size : _HEADER_NBYTES])
    computed_sum = _choices_sum(fixed, body)
    if stored_sum != computed_sum:
        raise RowError("indexer record checksum", computed_sum.hex(), stored_sum.hex())
    choices = tokens * layers
    claimed = f"{tokens} x {layers} x {k}"
    wide_nbytes = _WIDE_GAP.itemsize * wide
    is_possible = layers > 0 and k > 0 and choices <= INDEXER_ROWS_MAX
    if not is_possible or len(body) < 8 * choices + wide_nbytes:
        wanted = "as many choices as it claims to have"
        raise RowError("indexer record", wanted, claimed)
    if 4 * k * max(choices, 1) > nbytes_max or k >= INDEXER_ROWS_MAX:
        wanted = f"rows of at most {nbytes_max} bytes"
        raise RowError("indexer record", wanted, claimed)
    head = np.frombuffer(body, "<u4", choices)
    first = np.frombuffer(body, "<i4", choices, 4 * choices)
    counts = (head & (_BESIDE - 1)).astype(np.int64)
    beside = head >= _BESIDE
    lengths = np.where(beside, 0, counts - 1)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    behind = 8 * choices + int(starts[-1])
    is_possible = bool((lengths >= 0).all() and (counts <= k).all())
    if not is_possible or len(body) != behind + wide_nbytes:
        wanted = f"choices of at most {k} positions, and their gaps"
        raise RowError("indexer record", wanted, f"{len(body)} bytes")
    gaps = np.frombuffer(body, np.uint8, int(starts[-1]), 8 * choices)
    extra = np.frombuffer(body, _WIDE_GAP, wide, behind)
    if not np.array_equal(np.flatnonzero(gaps == _WIDE), extra["place"]):
        wanted = f"a wide gap for each gap of {_WIDE}, in order"
        raise RowError("indexer record", wanted, "others")
    if (extra["more"] >= _GAP_END - _WIDE).any():
        raise RowError("indexer record", f"wide gaps below {_GAP_END}", "others")
    flat = np.empty((choices, k), np.int32)
    columns = np.arange(k, dtype=np.int32)
    for part in _chunks(np.flatnonzero(beside)):
        is_chosen = columns < counts[part, None]
        flat[part] = np.where(is_chosen, first[part, None] + columns, NONE)
    places = np.searchsorted(extra["place"], starts)  # of each choice, its first wide gap
    for part in _chunks(np.flatnonzero(~beside)):
        begin = part[0]
        end = part[-1] + 1
        whole = end - begin == len(part) and bool((counts[part] == k).all())
        if whole:
            own = flat[begin:end]
            of_part = gaps[starts[begin] : starts[end]]
            own[:, 1:] = of_part.reshape(len(part), k - 1)
        else:
            own = np.zeros((len(part), k), np.int32)
            for row, choice in zip(own, part.tolist(), strict=True):
                row[1 : counts[choice]] = gaps[starts[choice] : starts[choice + 1]]
        own[:, 1:] += 1
        own[:, 0] = first[part]
        more = extra[places[begin] : places[end]]  # no other choice between has gaps
        if len(more):
            gaps_of = places[part + 1] - places[part]
            row_of = np.repeat(np.arange(len(part)), gaps_of)
            columns_of = more["place"].astype(np.int64) - starts[part][row_of] + 1
            own[row_of, columns_of] += more["more"].astype(np.int32)
        np.cumsum(own, axis=1, out=own)
        if not whole:
            own[columns >= counts[part, None]] = NONE
            flat[part] = own
    empty = counts == 0
    is_sound = (flat >= NONE).all() and (flat[~empty, 0] >= 0).all()
    if not is_sound or (first[empty] != NONE).any():
        wanted = f"positions from 0 to {np.iinfo(np.int32).max}"
        raise RowError("indexer record", wanted, "others")
    ends = np.flatnonzero(~beside)
    reach = flat[ends, counts[ends] - 1] - flat[ends, 0]
    if (reach == counts[ends] - 1).any():
        wanted = "positions side by side as their first one"
        raise RowError("indexer record", wanted, "each of them")
    return flat.reshape(tokens, layers, k)


def _chunks(choices: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    begins = range(0, len(choices), PACKED_AT_ONCE)
    return [choices[begin : begin + PACKED_AT_ONCE] for begin in begins]


def _wide(
    gaps: NDArray[np.uint32],
    over: NDArray[np.int64],
    starts: NDArray[np.int64],
    choices: NDArray[np.int64],
    layers: int,
) -> NDArray[Any]:
    """The wide ones of some choices' ``gaps`` ``[choices, positions - 1]``, those at the places ``over``."""
    rows, columns = np.divmod(over, gaps.shape[1])
    values = gaps.reshape(-1)[over]
    wrong = values >= _GAP_END
    if wrong.any():
        raise _not_canonical(int(choices[rows[int(wrong.argmax())]]), layers)
    extra = np.empty(len(rows), _WIDE_GAP)
    extra["place"] = starts[rows] + columns
    extra["more"] = values - _WIDE
    return extra


def _check_others(
    flat: NDArray[np.int32],
    counts: NDArray[np.int64],
    beside: NDArray[np.bool_],
    layers: int,
) -> None:
    """:class:`RowError` unless the choices that end early or lie ``beside`` each other are what their ends say."""
    k = flat.shape[1]
    columns = np.arange(k, dtype=np.int64)
    for part in _chunks(np.flatnonzero(beside | (counts < k))):
        rows = flat[part]
        tail = columns >= counts[part, None]
        due = rows[:, :1] + columns
        is_wrong = np.where(tail, rows != NONE, rows < 0)
        is_wrong |= ~tail & beside[part, None] & (rows != due)
        wrong = is_wrong.any(axis=1)
        if wrong.any():
            raise _not_canonical(int(part[int(wrong.argmax())]), layers)


def _not_canonical(choice: int, layers: int) -> RowError:
    where = f"indexer row of token {choice // layers} layer {choice % layers}"
    return RowError(where, "increasing positions, then -1", "others: see canonical()")


def _choices_sum(fixed: Buffer, body: Buffer) -> bytes:
    running = xxhash.xxh3_128(fixed)
    running.update(body)
    return running.digest()


__all__ = ["INDEXER", "canonical", "indexer_spec", "indexer_spec_from_hf", "of_layers", "pack", "unpack"]
