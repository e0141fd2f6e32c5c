"""Routes for the trainer: the experts that each token's MoE layers chose; missing ones are masked, never guessed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray
from pybase64 import b64encode_as_string

from cache_manager.errors import RowError
from cache_manager.publish import Rows
from cache_manager.spec import AuxBlockDataSpec
from kvroute.checks import whole
from kvroute.routes import spans, wire
from kvroute.routes.cells import (
    Cells,
    Mask,
    blank,
    check_known,
    known_stop,
    last_of,
    missing_error,
    replaced,
    some_known,
    union,
)
from kvroute.routes.fill import FillPlan, Missing
from kvroute.routes.layout import Layers, Layout, check_alike
from kvroute.routes.spans import UNKNOWN, WeightsSpan
from kvroute.routes.support import SamplingSupport, with_support
from kvroute.routes.token_hash import (
    TokenHash,
    check_tokens,
    joined_hashes,
    of_one_sequence,
    token_hashes,
    token_ids,
    tying,
)

JSON_FORMAT: Final = "kvroute.routes/4"


class Routes(Cells):
    """The routing rows of the tokens at positions ``start .. start + n - 1`` of one sequence.

    ``ids[i, l, k]`` is the k-th expert that layer ``layer_ids[l]`` chose for position ``start + i``; it is valid if
    ``known[i, l]``, and all ones in binary otherwise. The dtype is the narrowest unsigned one for ``num_experts``; the
    arrays are read-only copies that belong to the routes.

    ``valid`` may be given as bool ``[n]`` or, cell by cell, ``[n, layers]``. The attribute is always ``[n]``: whether
    *all* layers of ``layer_ids`` are known. A layer of the model is in ``layer_ids``, or in ``missing_layers`` (it has
    a router, but no row here has its choices), or dense.

    ``weights_versions`` are increasing ``(start, stop, version)`` by position; others are unknown. ``token_hashes``
    ``(n, hash)`` identify the first ``n`` tokens of the sequence: :meth:`bind`, :meth:`validate`.

    Raises :class:`RowError` for arrays that do not fit, and for a known cell that no router can have chosen: an id
    outside ``[0, num_experts)`` or twice in one layer; the error names the position and the layer id.

    >>> import numpy as np
    >>> ids = np.array([[[1, 0]], [[9, 9]], [[2, 3]]])
    >>> routes = Routes(ids, valid=[True, False, True], layer_ids=(1,), num_experts=4, num_layers=2, start=10)
    >>> routes
    Routes(positions 10..12, 1 of 2 layers, top 2 of 4 experts, 1 missing)
    >>> routes.missing, routes.ids[1].tolist()
    (((11, 12),), [[255, 255]])
    """

    __slots__ = ()

    def __init__(
        self,
        ids: ArrayLike,  # [n, layers, top_k]  integers
        valid: ArrayLike,  # [n] or [n, layers]  bool
        layer_ids: Iterable[int],
        num_experts: int,
        num_layers: int,
        start: int = 0,
        weights_versions: Iterable[WeightsSpan] = (),
        token_hashes: Iterable[TokenHash] = (),
        missing_layers: Iterable[int] = (),
    ) -> None:
        array = np.asarray(ids)
        mask = np.array(valid)
        if array.ndim != 3:
            wanted = "integers [n, layers, top_k]"
            got = f"{array.dtype} of shape {array.shape}"
            raise RowError("routes.ids", wanted, got)
        layout = Layout(tuple(layer_ids), num_experts, num_layers, array.shape[2], tuple(missing_layers))
        check_known(layout, array, mask, start)
        own = np.array(array, layout.dtype, order="C")  # known ids fit
        super().__init__(layout, own, mask, start, tuple(weights_versions), tuple(token_hashes))

    @classmethod
    def from_rows(
        cls,
        spec: AuxBlockDataSpec,
        rows: Rows,
        start: int = 0,
        *,
        weights_version: int | Rows | None = None,
        checked: bool = False,
        missing_layers: Iterable[int] = (),
    ) -> Routes:
        """Routes of rows that ``AuxBlocks.read`` returned for ``spec``; ``start`` is the position of the first row.

        ``missing_layers`` are those of other pipeline stages: they have a router, but are not in ``spec``.

        ``weights_version`` is one version for all rows, or the rows of a ``weights_version`` spec for the same
        positions. ``checked=True`` promises that every valid row was checked when it was written, as
        ``RoutingCapture`` does: then the call costs one copy. Else :class:`RowError` names a row that no router can
        have chosen.
        """
        layout = Layout.of(spec, missing_layers)
        ids = np.asarray(rows.values)
        valid = np.asarray(rows.valid)
        if ids.shape[1:] != spec.row_shape:
            wanted = f"shape (n, {', '.join(map(str, spec.row_shape))})"
            raise RowError(f"{spec.name} rows", wanted, ids.shape)
        spanned: tuple[WeightsSpan, ...] = ()
        if isinstance(weights_version, (int, np.integer)):
            version = whole("weights_version", weights_version, error=RowError)
            spanned = ((start, start + len(ids), version),) if len(ids) else ()
        elif weights_version is not None and not isinstance(weights_version, Rows):
            wanted = "an integer, or Rows of a weights_version spec"
            raise RowError("weights_version", wanted, repr(weights_version))
        elif weights_version is not None:
            labels = np.asarray(weights_version.values)
            labelled = np.asarray(weights_version.valid)
            if labels.shape != (len(ids),) or labelled.shape != (len(ids),) or labels.dtype.kind not in "iu":
                wanted = f"integers [{len(ids)}]"
                got = f"{labels.dtype} {labels.shape}"
                raise RowError("weights_version rows", wanted, got)
            if labelled.dtype != np.bool_:  # integers would act as indices
                wanted = f"bool [{len(ids)}]"
                got = f"{labelled.dtype} {labelled.shape}"
                raise RowError("weights_version valid", wanted, got)
            spanned = spans.from_positions(np.where(labelled, labels.astype(np.int64), UNKNOWN), start)
        if not checked:
            check_known(layout, ids, valid, start)
        return checked_routes(layout, np.array(ids, layout.dtype, order="C"), valid.copy(), start, spanned)

    # ---------------------------------------------------------------- what there is

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The layers that the ids are of."""
        return self.layout.layer_ids

    @property
    def missing_layers(self) -> tuple[int, ...]:
        """The layers that have a router, but no ids here."""
        return self.layout.missing_layers

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """The model's layers with a router, increasing: :attr:`layer_ids` and :attr:`missing_layers`."""
        return self.layout.routed_layers

    @property
    def num_experts(self) -> int:
        """Ids are below this."""
        return self.layout.num_experts

    @property
    def num_layers(self) -> int:
        """Layers of the model, with a router or without."""
        return self.layout.num_layers

    @property
    def top_k(self) -> int:
        """Experts that a layer chooses for a token."""
        return self.layout.top_k

    def __len__(self) -> int:
        return len(self.ids)

    def __eq__(self, other: object) -> bool:
        """Equal positions, layers, versions, token hashes, masks and ids."""
        if not isinstance(other, Routes):
            return NotImplemented
        names = ("start", "layout", "weights_versions", "token_hashes")
        same = all(getattr(self, name) == getattr(other, name) for name in names)
        return same and np.array_equal(self.mask, other.mask) and np.array_equal(self.ids, other.ids)

    __hash__ = None  # type: ignore[assignment]  # arrays inside: compared by value, never used as a key

    def __repr__(self) -> str:
        where = f"positions {self.start}..{self.stop - 1}" if len(self) else f"no positions at {self.start}"
        layers = f"{len(self.layer_ids)} of {self.num_layers} layers, top {self.top_k} of {self.num_experts} experts"
        lost = sum(stop - start for start, stop in self.missing)
        return f"Routes({where}, {layers}, {f'{lost} missing' if lost else 'complete'})"

    # ---------------------------------------------------------------- parts

    def merge(self, *others: Routes, tokens: ArrayLike | None = None) -> Routes:
        """The union of these routes and ``others``, parts of one sequence in any order, by position and layer.

        A cell known in several parts must be the same in all of them, and a row's known weights versions must be equal;
        so merging a part again changes no row. Positions between the parts are missing. A missing row has no version.

        There must be a proof that they are of one sequence (:mod:`kvroute.routes.token_hash` has the rule): ``tokens``
        ``[n]``, to which this binds all of them, or token hashes. The result has the hashes that hold for the whole.

        :class:`RowError` names position and layer where two parts differ; and parts of another model or other tokens.
        """
        parts = (self, *others)
        check_alike(parts, "part")
        if tokens is None:
            return union(parts, token_hashes=of_one_sequence([(known_stop(part), part.token_hashes) for part in parts]))
        ids = token_ids(tokens)
        part_hashes = (entry for part in parts for entry in part.token_hashes)
        hashes = joined_hashes((*part_hashes, *token_hashes(ids, [len(ids)])))
        check_tokens(hashes, ids, max(part.stop for part in parts))
        return union(parts, token_hashes=hashes)

    def without(self, layers: Iterable[int], at: ArrayLike) -> Routes:
        """These routes without the cells of the layers with these ids, in the rows ``at`` bool ``[n]``.

        :class:`RowError` for a layer without a router.
        """
        rows = np.asarray(at)
        if rows.dtype != np.bool_ or rows.shape != self.valid.shape:
            got = f"{rows.dtype} of shape {rows.shape}"
            raise RowError("at", f"bool of shape {self.valid.shape}", got)
        dense = (wanted := set(layers)).difference(self.routed_layers)
        if dense:
            raise RowError("layers", f"some of the routed layers {self.routed_layers}", dense)
        known = self.known & ~(rows[:, None] & np.array([n in wanted for n in self.layer_ids]))
        ids = self.ids.copy()
        blank(ids, known)
        return replaced(self, ids=ids, mask=known)

    def slice(self, start: int, stop: int) -> Routes:
        """The routes of the *positions* ``[start, stop)``, sharing memory; they must lie inside these routes.

        A token hash of more than ``stop + 1`` tokens is kept only where no other ties the rows to their tokens:
        such a part is refused with tokens that cannot be compared. To cut a sequence off there, first :meth:`bind` the
        routes to its tokens with a count of ``stop + 1``.
        """
        if not self.start <= start <= stop <= self.stop:
            wanted = f"positions inside [{self.start}, {self.stop}]"
            raise RowError("slice", wanted, f"[{start}, {stop})")
        part = np.s_[start - self.start : stop - self.start]
        rows = last_of(some_known(self.mask[part]))
        return replaced(
            self,
            ids=self.ids[part],
            mask=self.mask[part],
            start=start,
            weights_versions=spans.clipped(self.weights_versions, start, stop),
            token_hashes=tying(self.token_hashes, start + rows if rows else 0, stop + 1),
        )

    # ---------------------------------------------------------------- tokens

    def bind(self, tokens: ArrayLike, counts: Iterable[int] | None = None) -> Routes:
        """These routes, bound to ``tokens`` ``[n]``, the ids of the sequence from position 0; memory is shared.

        There must be a token for every position up to :attr:`stop`; one more is usual, because the last sampled token
        has no row. With ``counts`` they are bound to hashes of that many first tokens each, and to no others but those
        without which rows that were tied to tokens would not be. :class:`RowError` for too few tokens; if the routes
        are already bound to other tokens; and if nothing but hashes of more tokens than these ties their rows.
        """
        ids = token_ids(tokens, self.stop)
        held = [count for count, _ in self.token_hashes if count >= known_stop(self)]
        if held and held[0] > len(ids):
            raise RowError("tokens", f"{held[0]} or more, as the routes are bound to", len(ids))
        wanted = {len(ids)} if counts is None else set(counts)
        hashes = token_hashes(ids, wanted.union(count for count, _ in self.token_hashes if count <= len(ids)))
        joined = joined_hashes((*self.token_hashes, *hashes))
        if counts is None:
            return replaced(self, token_hashes=joined)
        own = tuple(h for h in hashes if h[0] in wanted)
        if held and not any(count >= known_stop(self) for count, _ in own):
            own = joined_hashes((*own, *(h for h in self.token_hashes if h[0] in held)))
        return replaced(self, token_hashes=own)

    def validate(
        self,
        tokens: ArrayLike | None = None,
        *,
        rows: int | None = None,
        loss_mask: ArrayLike | None = None,
    ) -> None:
        """Raise :class:`RowError` unless these routes are sound and are what a trainer needs for a sequence.

        Always: shapes, ids in range, distinct in each layer. With ``tokens`` ``[n]``: every token hash matches its
        number of first tokens, one covers the last row, and no row lies beyond them. With ``rows``: the rows of all
        positions ``[0, rows)`` are there, in every routed layer. With ``loss_mask`` ``[n]``: for each position ``t``
        with a loss, the row ``t - 1``, with which its log probability was computed, is there.
        """
        check_known(self.layout, self.ids, self.mask, self.start)
        if tokens is not None:
            check_tokens(self.token_hashes, token_ids(tokens, self.stop), known_stop(self))
        if rows is not None and (gap := self.first_gap(rows)) is not None:
            raise missing_error(gap, f"a row for each of the positions [0, {rows})")
        if loss_mask is not None:
            for first, stop in spans.runs(np.asarray(loss_mask)[1:] != 0):  # the rows before positions with a loss
                gap = self.first_gap(stop, first)
                if gap is not None:
                    raise missing_error(gap, f"a row, as position {gap[0] + 1} has a loss")

    # ---------------------------------------------------------------- for trainers

    def materialize(
        self,
        rows: int,
        layers: Layers = "all",
        dtype: DTypeLike = "int32",
        missing: Missing = "error",
        *,
        ep: int = 1,
    ) -> NDArray[Any]:
        """The ids of the positions ``[0, rows)`` for a trainer: ``[rows, layers, top_k]`` of ``dtype``.

        Row ``i`` is position ``i``, whatever :attr:`start` is. A sequence of ``n`` tokens has ``n - 1`` rows: the last
        sampled token was never read. ``layers``: ``"all"`` gives each of :attr:`num_layers` layers a place, dense ones
        ids of 0; ``"moe"`` gives :attr:`routed_layers` only; a sequence of layer ids gives those, in that order.

        ``missing`` spells unknown cells, and missing rows in all layers: ``"error"`` refuses them, ``"zero"``,
        ``"minus1"``, ``"arange"`` (``0 .. top_k - 1``), or ``"spread"``, distinct ids that visit each of the ``ep``
        expert-parallel ranks before any twice. The result is new, in C order and writable.
        :func:`~kvroute.routes.shard_packed` gives a row for every token, also for the last one.

        Raises :class:`RowError` naming the first missing position and layer, and for a dtype that cannot hold the ids.
        """
        plan = FillPlan(self.layout, layers, np.dtype(dtype), ep, missing)
        out = np.empty((whole("rows", rows, error=RowError), len(plan.layers), self.top_k), plan.dtype)
        plan.fill(out, self, 0, missing)
        return out

    # ---------------------------------------------------------------- outside memory

    def to_bytes(self, support: SamplingSupport | None = None) -> bytes:
        """These routes as one self-describing record with checksums: :mod:`kvroute.routes.wire`.

        With ``support``, of the same sequence by its token hashes, the record has that, too;
        :meth:`SamplingSupport.of_record` returns it. :class:`RowError` if nothing shows that they are of one sequence.
        """
        header, parts = wire.record(self)
        header, content = with_support(header, self, support)
        return b"".join((header.pack(), parts, content))

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Routes:
        """The routes of a record, however its parts are cut. Raises :class:`RowError` for anything else, also if one
        bit has changed. A record's sampling support is checked, and left to :meth:`SamplingSupport.of_record`.
        """
        header, ids, _ = wire.read(data)
        routes = routes_of_record(header, ids)
        routes.validate()
        return routes

    def to_json(self) -> dict[str, str]:
        """These routes as a JSON object: ``format``, and ``record``, the base64 of :meth:`to_bytes`."""
        return {"format": JSON_FORMAT, "record": b64encode_as_string(self.to_bytes())}

    @classmethod
    def from_json(cls, encoded: Mapping[str, Any]) -> Routes:
        """The routes of an object of :meth:`to_json`. :class:`RowError` for anything else."""
        if not isinstance(encoded, Mapping) or set(encoded) != {"format", "record"}:
            got = sorted(map(str, encoded)) if isinstance(encoded, Mapping) else type(encoded).__name__
            wanted = f"an object of {JSON_FORMAT}, with format and record"
            raise RowError("routes", wanted, got)
        if encoded["format"] != JSON_FORMAT:
            raise RowError("routes.format", JSON_FORMAT, repr(encoded["format"]))
        return cls.from_bytes(wire.from_base64("routes.record", encoded["record"]))


def checked_routes(
    layout: Layout,
    ids: NDArray[Any],  # [n, layers, top_k]
    mask: Mask,
    start: int = 0,
    weights_versions: Iterable[WeightsSpan] = (),
    token_hashes: Iterable[TokenHash] = (),
) -> Routes:
    """The routes of these fields, whose known ids were checked when they were written; all else is checked here.

    Arrays of the right dtype are taken over. Ids that no router can have chosen would pass unnoticed.
    """
    routes = object.__new__(Routes)
    Cells.__init__(routes, layout, ids, mask, start, tuple(weights_versions), tuple(token_hashes))
    return routes


def routes_of_record(
    header: wire.Header,
    ids: NDArray[Any],
    first: int = 0,
    layers: Sequence[int] | None = None,
) -> Routes:
    """The routes of the rows of a record from ``first`` on, whose ``ids`` ``[n, layers, top_k]`` these are.

    ``layers`` are indices of the record's layers (``None``: all of them); its other layers become missing. The ids
    are taken over, and known to be those that were written; :class:`RowError` for a header that does not fit them.
    """
    layout = header.layout
    mask = header.mask[first : first + len(ids)]
    rows = last_of(some_known(mask))
    if layers is not None:
        layout = layout.only(tuple(layout.layer_ids[i] for i in layers))
        mask = mask if mask.ndim == 1 else mask[:, list(layers)]
    start = header.start + first
    stop = header.start + first + len(ids)
    versions = spans.checked_versions(header.weights_versions, header.start, header.stop)
    hashes = joined_hashes(header.token_hashes)
    if stop < header.stop:  # as a slice
        hashes = tying(hashes, start + rows if rows else 0, stop + 1)
    return checked_routes(layout, ids, mask, start, spans.clipped(versions, start, stop), hashes)
