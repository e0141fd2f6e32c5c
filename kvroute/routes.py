"""What the trainer gets: the experts that each token's MoE layers chose, missing rows masked and never guessed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from cache_manager.errors import RowError
from cache_manager.spec import AuxBlockDataSpec
from kvroute import spans
from kvroute.checks import check_ids, valid_rows
from kvroute.materialize import Filler, Layers, Missing, materialized
from kvroute.merging import merged
from kvroute.routing import routing_spec
from kvroute.spans import RowsLike, Span, WeightsSpan
from kvroute.token_hash import TokenHash, check_tokens, joined_hashes, token_hash, token_hashes

if TYPE_CHECKING:
    from kvroute.sharding import Split


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Routes:
    """The routing rows of the tokens at positions ``start .. start + n - 1`` of one sequence.

    ``ids[i, l, k]`` is the k-th expert that layer ``layer_ids[l]`` chose for position ``start + i``; it means
    something only where ``valid[i]``. The ids of a missing row are all ones in binary, whatever memory they came from.
    The dtype is always the narrowest unsigned one for ``num_experts``; both arrays are read-only copies that belong to
    the routes.

    ``weights_versions`` are ``(start, stop, version)`` by position: increasing, without overlap, inside the routes.
    Positions that no range covers have no known version.

    ``token_hashes`` bind the routes to the tokens that they belong to: ``(n, hash)`` says what the first ``n`` tokens
    of the sequence are, counted from position 0. See :meth:`bind` and :meth:`validate`.

    Raises :class:`RowError` for arrays that do not fit, and for a valid row that no router can have chosen: an id
    outside ``[0, num_experts)`` or twice in one layer; the error names the position and the layer id.

    >>> import numpy as np
    >>> ids = np.array([[[1, 0]], [[9, 9]], [[2, 3]]])
    >>> routes = Routes(ids, valid=[True, False, True], layer_ids=(1,), num_experts=4, num_layers=2, start=10)
    >>> routes
    Routes(positions 10..12, 1 of 2 layers, top 2 of 4 experts, 1 missing)
    >>> routes.missing, routes.ids[1].tolist()
    (((11, 12),), [[255, 255]])
    """

    ids: NDArray[Any]  # [n, layers, top_k]  uint8 | uint16 | uint32
    valid: NDArray[np.bool_]  # [n]
    layer_ids: tuple[int, ...]
    num_experts: int
    num_layers: int
    start: int = 0
    weights_versions: tuple[WeightsSpan, ...] = ()
    token_hashes: tuple[TokenHash, ...] = ()

    def __post_init__(self) -> None:
        self._settle(checked=False)

    def _settle(self, *, checked: bool) -> None:
        """Check all fields, the ids' values unless ``checked``, and put copies in their place."""
        ids, valid = np.asarray(self.ids), np.asarray(self.valid)
        if ids.ndim != 3 or ids.dtype.kind not in "iu":
            raise RowError("routes.ids", "integers [n, layers, top_k]", f"{ids.dtype} of shape {ids.shape}")
        if valid.dtype != np.bool_ or valid.shape != ids.shape[:1]:
            wanted, got = f"bool of shape {ids.shape[:1]}", f"{valid.dtype} of shape {valid.shape}"
            raise RowError("routes.valid", wanted, got)
        if not isinstance(self.start, (int, np.integer)) or isinstance(self.start, bool) or self.start < 0:
            raise RowError("routes.start", "a position, 0 or more", repr(self.start))
        # The spec's own checks say what layers, experts and top-k can be.
        spec = routing_spec(self.num_experts, ids.shape[2], self.layer_ids, self.num_layers, block_tokens=1)
        if spec.row_shape[0] != ids.shape[1]:
            raise RowError("routes.ids", f"{spec.row_shape[0]} layers as in layer_ids", ids.shape[1])
        set_field = object.__setattr__
        set_field(self, "start", int(self.start))
        set_field(self, "num_experts", spec.attrs["num_experts"])
        set_field(self, "num_layers", spec.attrs["num_layers"])
        set_field(self, "layer_ids", spec.attrs["layer_ids"])
        complete = bool(valid.all())
        if not checked:
            kept = np.flatnonzero(valid)
            check_ids(ids if complete else ids[kept], self.num_experts, self.layer_ids, kept + self.start)
        owned = np.array(ids, dtype=spec.dtype, order="C")  # every valid id fits: it was checked
        if not complete:
            owned[~valid] = np.iinfo(spec.dtype).max
        set_field(self, "ids", _read_only(owned))
        set_field(self, "valid", _read_only(valid.copy()))
        set_field(self, "weights_versions", spans.checked_versions(self.weights_versions, self.start, self.stop))
        set_field(self, "token_hashes", joined_hashes(self.token_hashes))

    @classmethod
    def from_rows(
        cls,
        spec: AuxBlockDataSpec,
        rows: RowsLike,
        start: int = 0,
        *,
        weights_version: int | RowsLike | None = None,
        bad: Literal["raise", "missing"] = "raise",
        checked: bool = False,
    ) -> Routes:
        """Routes of what ``AuxBlocks.read`` answered for ``spec``; ``start`` is the position of the first row.

        ``weights_version`` is one version for all rows, or the rows of a ``weights_version`` spec for the same
        positions: their invalid rows have no known version.

        ``bad`` says what becomes of a valid row that no router can have chosen: ``"raise"`` refuses all rows with the
        :class:`RowError` that names it, ``"missing"`` leaves it out. ``checked=True`` promises that every valid row was
        checked when it was written, as ``RoutingCapture`` does, and spares looking again: then it costs one copy.
        """
        if missing := [a for a in ("num_experts", "layer_ids", "num_layers") if a not in spec.attrs]:
            raise RowError(f"{spec.name} spec", "a routing spec", f"one without {', '.join(missing)}")
        if bad not in ("raise", "missing"):
            raise RowError("bad", "raise or missing", repr(bad))
        ids, valid = np.asarray(rows.values), np.asarray(rows.valid)
        if ids.shape[1:] != spec.row_shape:
            raise RowError(f"{spec.name} rows", f"shape (n, {', '.join(map(str, spec.row_shape))})", ids.shape)
        if bad == "missing" and not checked:
            valid, checked = valid & valid_rows(spec, ids), True
        versions: Iterable[WeightsSpan] = ()
        if isinstance(weights_version, (int, np.integer)):
            versions = ((start, start + len(ids), int(weights_version)),) if len(ids) else ()
        elif weights_version is not None:
            versions = spans.of_rows(weights_version, len(ids), start)
        layers, experts, total = (spec.attrs[name] for name in ("layer_ids", "num_experts", "num_layers"))
        return cls.checked(ids, valid, layers, experts, total, start, tuple(versions), checked=checked)

    @classmethod
    def checked(
        cls,
        ids: NDArray[Any],
        valid: NDArray[np.bool_],
        layer_ids: tuple[int, ...],
        num_experts: int,
        num_layers: int,
        start: int = 0,
        weights_versions: tuple[WeightsSpan, ...] = (),
        token_hashes: tuple[TokenHash, ...] = (),
        *,
        checked: bool = True,
    ) -> Routes:
        """The routes of these fields, whose valid ids were checked when they were written; the rest is checked here.

        Ids that no router can have chosen would get through. ``checked=False`` is the class itself.
        """
        made = object.__new__(cls)
        made._set(ids, valid, layer_ids, num_experts, num_layers, start, weights_versions, token_hashes)
        made._settle(checked=checked)
        return made

    # ---------------------------------------------------------------- parts

    def append(self, other: Routes) -> Routes:
        """These routes and what ``other`` adds: :meth:`merge`, but ``other`` may not leave a gap before or after them.

        A part that begins earlier than these stop is a prefix sent again, or a delta that came twice: what is there
        already must be the same, and changes nothing.
        """
        if len(self) and not other.start <= self.stop:
            raise RowError("routes.start", f"position {self.stop} or earlier, where these routes stop", other.start)
        if len(self) and other.stop < self.start:
            raise RowError("routes.stop", f"position {self.start} or later, where these routes start", other.stop)
        return self.merge(other)

    def merge(self, *others: Routes) -> Routes:
        """The union of these routes and ``others``, parts of the same sequence in any order, by absolute position.

        A row that several parts have must be the same in all of them, and of the same weights version as far as that
        is known. One that only some have is taken from those. Positions between the parts are missing. So merging a
        part once more changes nothing. Token hashes of all parts are kept.

        Raises :class:`RowError` naming the position and the layer where two parts differ, and for parts of other
        layers, experts or top-k, or of other tokens.
        """
        parts = (self, *others)
        ids, valid, start, versions = merged(parts)
        return self._with(ids, valid, start, versions, joined_hashes(h for p in parts for h in p.token_hashes))

    def slice(self, start: int, stop: int) -> Routes:
        """The routes of the *positions* ``[start, stop)``, sharing memory; they must lie inside these routes.

        A token hash of more than ``stop + 1`` tokens says nothing about a sequence cut off there, and goes.
        """
        if not self.start <= start <= stop <= self.stop:
            raise RowError("slice", f"positions inside [{self.start}, {self.stop}]", f"[{start}, {stop})")
        clipped = ((max(a, start), min(b, stop), v) for a, b, v in self.weights_versions)
        at = np.s_[start - self.start : stop - self.start]
        versions = tuple(v for v in clipped if v[0] < v[1])
        hashes = tuple(h for h in self.token_hashes if h[0] <= stop + 1)
        return self._with(self.ids[at], self.valid[at], start, versions, hashes)

    # ---------------------------------------------------------------- tokens

    def bind(self, tokens: ArrayLike, counts: Iterable[int] | None = None) -> Routes:
        """These routes, bound to ``tokens`` ``[n]``, the ids of the sequence from position 0; memory is shared.

        There must be a token for every position up to :attr:`stop`; one more is usual, as the last token that was
        sampled has no row. With ``counts`` they are bound to so many first tokens each, and to nothing else.
        :class:`RowError` for too few tokens, and when the routes are bound to as many other tokens already.
        """
        if (count := len(np.asarray(tokens))) < self.stop:
            raise RowError("tokens", f"{self.stop} or more, one for every position", count)
        hashes = (*self.token_hashes, (count, token_hash(tokens))) if counts is None else token_hashes(tokens, counts)
        return self._with(self.ids, self.valid, self.start, self.weights_versions, joined_hashes(hashes))

    def validate(
        self, tokens: ArrayLike | None = None, *, rows: int | None = None, loss_mask: ArrayLike | None = None
    ) -> None:
        """Raise :class:`RowError` unless these routes are sound and are what a trainer needs for a sequence.

        Always: shapes, ids in range, distinct in each layer. With ``tokens`` ``[n]``: every token hash is that of so
        many first tokens, there is one, and no row lies beyond them. With ``rows``: the rows of all positions
        ``[0, rows)`` are there. With ``loss_mask`` ``[n]``: for each position ``t`` with a loss, the row ``t - 1``,
        which its log probability was computed with, is there.
        """
        kept = np.flatnonzero(self.valid)
        sound = self.ids if self.complete else self.ids[kept]
        check_ids(sound, self.num_experts, self.layer_ids, kept + self.start)
        if tokens is not None:
            if len(given := np.asarray(tokens)) < self.stop:
                raise RowError("tokens", f"{self.stop} or more, one for every position", len(given))
            check_tokens(self.token_hashes, given)
        if rows is not None and (gap := self.first_missing(rows)) is not None:
            raise RowError(f"row {gap}", f"a row for each of the positions [0, {rows})", "none")
        if loss_mask is not None:
            targets = np.flatnonzero(np.asarray(loss_mask))
            there = np.zeros(max(self.stop, int(targets.max(initial=0)) + 1), np.bool_)
            there[self.start : self.stop] = self.valid
            sources = targets[targets > 0] - 1
            if not there[sources].all():
                lost = int(sources[~there[sources]][0])
                raise RowError(f"row {lost}", f"a row, as position {lost + 1} has a loss", "none")

    # ---------------------------------------------------------------- what there is

    @property
    def stop(self) -> int:
        """The position after the last row."""
        return self.start + len(self.ids)

    @property
    def top_k(self) -> int:
        return int(self.ids.shape[2])

    @property
    def complete(self) -> bool:
        """Whether no row is missing."""
        return bool(self.valid.all())

    @property
    def missing(self) -> tuple[Span, ...]:
        """The positions without a row, as maximal ranges ``[start, stop)`` in increasing order."""
        return tuple((self.start + a, self.start + b) for a, b in spans.runs(~self.valid))

    def first_missing(self, stop: int, start: int = 0) -> int | None:
        """The first position in ``[start, stop)`` without a row, whether inside these routes or not."""
        if start < self.start and start < stop:
            return start
        there = self.valid[start - self.start : stop - self.start] if start < min(stop, self.stop) else self.valid[:0]
        if not there.all():
            return start + int(there.argmin())
        reached = start + len(there)
        return reached if reached < stop else None

    # ---------------------------------------------------------------- for trainers

    def materialize(
        self,
        rows: int,
        layers: Layers = "all",
        dtype: DTypeLike = "int32",
        missing: Missing = "error",
        *,
        required: int | None = None,
        pad: Filler | None = None,
        ep: int = 1,
        out: NDArray[Any] | None = None,
    ) -> NDArray[Any]:
        """The ids of the positions ``[0, rows)`` as a trainer takes them: ``[rows, layers, top_k]`` of ``dtype``.

        Row ``i`` is position ``i``, whatever :attr:`start` is; rows behind ``rows`` are left out. A sequence of ``n``
        tokens has rows for its first ``n - 1`` positions: the last sampled token was never read.

        ``layers``: ``"all"`` gives each of :attr:`num_layers` layers a place, those without experts ids of 0;
        ``"moe"`` gives :attr:`layer_ids` only; a sequence of layer ids gives those, in that order.

        ``missing`` spells the rows that are not there (all layers of it): ``"error"`` refuses them, ``"zero"``,
        ``"minus1"``, ``"arange"`` (``0 .. top_k - 1``), or ``"spread"``, distinct ids that go round the ``ep`` expert
        parallel ranks first. With ``required``, that is for positions before it; from there on a row that is not there
        is spelled as ``pad`` has it (``missing``, if that is not given).

        The result is new, in C order and writable; or it is ``out``, of that shape and dtype, which may be a view.

        Raises :class:`RowError` naming the first position that is missing, and for a dtype that cannot hold the ids.
        """
        return materialized(self, rows, layers, np.dtype(dtype), missing, required, pad, ep, out)

    def shard(
        self,
        tokens: int,
        split: Split,
        layers: Layers = "moe",
        dtype: DTypeLike = "int64",
        missing: Missing = "error",
        *,
        pad: Filler = "spread",
        ep: int = 1,
    ) -> NDArray[Any]:
        """What one rank's routers see of this sequence of ``tokens`` tokens, alone in a packed batch.

        ``[local tokens, layers of the stage, top_k]``; :func:`kvroute.sharding.shard_packed` does so for many
        sequences, :func:`kvroute.sharding.shard_padded` for batches ``[batch, sequence]``.
        """
        from kvroute.sharding import shard_packed

        return shard_packed([self], [tokens], split, layers, dtype, missing, pad=pad, ep=ep)

    # ---------------------------------------------------------------- outside memory

    def to_bytes(self) -> bytes:
        """These routes as bytes that say all about themselves, with a checksum; :mod:`kvroute.routes_bytes`."""
        from kvroute.routes_bytes import to_bytes

        return to_bytes(self)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview, *, checked: bool = False) -> Routes:
        """The routes that :meth:`to_bytes` was given; ``checked=True`` trusts the writer to have checked the ids.

        Raises :class:`RowError` for anything else, whatever it is, and when one bit has changed.
        """
        from kvroute.routes_bytes import from_bytes

        return from_bytes(data, checked=checked)

    def to_json(self) -> dict[str, Any]:
        """These routes as a JSON object that says all about itself, with a checksum; :mod:`kvroute.routes_bytes`."""
        from kvroute.routes_bytes import to_json

        return to_json(self)

    @classmethod
    def from_json(cls, encoded: Mapping[str, Any]) -> Routes:
        """The routes that :meth:`to_json` was given. :class:`RowError` for anything else, whatever it is."""
        from kvroute.routes_bytes import from_json

        return from_json(encoded)

    # ---------------------------------------------------------------- as a value

    def __len__(self) -> int:
        return len(self.ids)

    def __eq__(self, other: object) -> bool:
        """Equal positions, layers, versions, token hashes, valid masks and ids."""
        if not isinstance(other, Routes):
            return NotImplemented
        names = ("start", "layer_ids", "num_experts", "num_layers", "weights_versions", "token_hashes")
        return (
            all(getattr(self, n) == getattr(other, n) for n in names)
            and np.array_equal(self.valid, other.valid)
            and np.array_equal(self.ids, other.ids)
        )

    __hash__ = None  # type: ignore[assignment]  # arrays inside: compared by value, never used as a key

    def __repr__(self) -> str:
        where = f"positions {self.start}..{self.stop - 1}" if len(self) else f"no positions at {self.start}"
        layers = f"{len(self.layer_ids)} of {self.num_layers} layers"
        lost = len(self) - int(np.count_nonzero(self.valid))
        state = f"{lost} missing" if lost else "complete"
        return f"Routes({where}, {layers}, top {self.top_k} of {self.num_experts} experts, {state})"

    def _with(
        self,
        ids: NDArray[Any],
        valid: NDArray[np.bool_],
        start: int,
        versions: tuple[WeightsSpan, ...],
        hashes: tuple[TokenHash, ...],
    ) -> Routes:
        """Routes of rows that were checked before; the arrays are taken over."""
        made = object.__new__(Routes)
        layout = self.layer_ids, self.num_experts, self.num_layers
        made._set(_read_only(ids), _read_only(valid), *layout, start, versions, hashes)
        return made

    def _set(self, *values: object) -> None:
        for name, value in zip(self.__slots__, values, strict=True):
            object.__setattr__(self, name, value)


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array
