"""The arrays of routes: ids by position and layer, which of them are known, and the checks that every one passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import RowError
from kvroute import cells, spans
from kvroute.cells import Gap, Known, UnknownSpan
from kvroute.checks import check_ids
from kvroute.routing import routing_spec
from kvroute.spans import Span, WeightsSpan
from kvroute.token_hash import TokenHash, joined_hashes


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RoutedCells:
    """What :class:`~kvroute.routes.Routes` are made of; its docstring says what each field is."""

    ids: NDArray[Any]  # [n, layers, top_k]  uint8 | uint16 | uint32
    valid: NDArray[np.bool_]  # [n]; may be given as [n, layers]
    layer_ids: tuple[int, ...]
    num_experts: int
    num_layers: int
    start: int = 0
    weights_versions: tuple[WeightsSpan, ...] = ()
    token_hashes: tuple[TokenHash, ...] = ()
    missing_layers: tuple[int, ...] = ()
    _known: Known = field(default=None, init=False)  # None: every row is whole or missing

    def __post_init__(self) -> None:
        self._settle(checked=False)

    def _settle(self, *, checked: bool) -> None:
        """Check all fields, the ids' values unless ``checked``, and put copies in their place."""
        ids, given = np.asarray(self.ids), np.asarray(self.valid)
        if ids.ndim != 3 or ids.dtype.kind not in "iu":
            raise RowError("routes.ids", "integers [n, layers, top_k]", f"{ids.dtype} of shape {ids.shape}")
        if given.dtype != np.bool_ or given.shape not in (ids.shape[:1], ids.shape[:2]):
            wanted, got = f"bool of shape {ids.shape[:1]} or {ids.shape[:2]}", f"{given.dtype} of shape {given.shape}"
            raise RowError("routes.valid", wanted, got)
        if not isinstance(self.start, (int, np.integer)) or isinstance(self.start, bool) or self.start < 0:
            raise RowError("routes.start", "a position, 0 or more", repr(self.start))
        # The spec's own checks say what layers, experts and top-k can be.
        spec = routing_spec(self.num_experts, ids.shape[2], self.layer_ids, self.num_layers, block_tokens=1)
        if spec.row_shape[0] != ids.shape[1]:
            raise RowError("routes.ids", f"{spec.row_shape[0]} layers as in layer_ids", ids.shape[1])
        valid, known = cells.split(given)
        set_field = object.__setattr__
        set_field(self, "start", int(self.start))
        for name in ("num_experts", "num_layers", "layer_ids"):
            set_field(self, name, spec.attrs[name])
        if self.missing_layers:
            layers = cells.missing_layers(self.missing_layers, self.layer_ids, self.num_layers)
            set_field(self, "missing_layers", layers)
        if not checked:
            self._check(ids, valid, known)
        owned = np.array(ids, dtype=spec.dtype, order="C")  # every known id fits: it was checked
        if not valid.all():
            owned[~valid if known is None else ~known] = np.iinfo(spec.dtype).max
        set_field(self, "ids", _read_only(owned))
        set_field(self, "valid", _read_only(valid.copy()))
        set_field(self, "_known", None if known is None else _read_only(known.copy()))
        set_field(self, "weights_versions", spans.checked_versions(self.weights_versions, self.start, self.stop))
        set_field(self, "token_hashes", joined_hashes(self.token_hashes))

    def _check(self, ids: NDArray[Any], valid: NDArray[np.bool_], known: Known) -> None:
        """Raise :class:`RowError` for a known cell that no router can have chosen."""
        kept = np.flatnonzero(cells.some(valid, known))
        sound = ids if len(kept) == len(ids) else ids[kept]
        if known is not None:
            sound = cells.only_known(sound, known[kept])
        check_ids(sound, self.num_experts, self.layer_ids, kept + self.start)

    # ---------------------------------------------------------------- what there is

    @property
    def stop(self) -> int:
        """The position after the last row."""
        return self.start + len(self.ids)

    @property
    def top_k(self) -> int:
        return int(self.ids.shape[2])

    @property
    def end(self) -> int:
        """The position after the last row of which anything is known; 0 when there is none."""
        back = self.some[::-1]
        return self.stop - int(back.argmax()) if back.any() else 0

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """The model's layers with a router, increasing: :attr:`layer_ids` and :attr:`missing_layers`."""
        return tuple(sorted((*self.layer_ids, *self.missing_layers))) if self.missing_layers else self.layer_ids

    @property
    def known(self) -> NDArray[np.bool_]:
        """Which cells are there, bool ``[n, layers]``, read-only."""
        return np.broadcast_to(self.valid[:, None], self.ids.shape[:2]) if self._known is None else self._known

    @property
    def some(self) -> NDArray[np.bool_]:
        """Of which rows anything is known, bool ``[n]``."""
        return cells.some(self.valid, self._known)

    @property
    def unknown(self) -> tuple[UnknownSpan, ...]:
        """``(layer id, start, stop)``: where other layers of a row are known but not this one, as maximal ranges."""
        return cells.unknown_spans(self._known, self.layer_ids, self.start)

    @property
    def cellwise(self) -> bool:
        """Whether some layers of a row are known and others are not; else ``valid`` says what ``known`` says."""
        return self._known is not None

    @property
    def complete(self) -> bool:
        """Whether nothing is missing: no row, and no layer."""
        return not self.missing_layers and bool(self.valid.all())

    @property
    def missing(self) -> tuple[Span, ...]:
        """The positions that lack a row, or a routed layer of it, as maximal ranges ``[start, stop)`` in order."""
        if self.missing_layers:
            return ((self.start, self.stop),) if len(self) else ()
        return tuple((self.start + a, self.start + b) for a, b in spans.runs(~self.valid))

    def first_missing(self, stop: int, start: int = 0) -> int | None:
        """The first position in ``[start, stop)`` without a whole row, whether inside these routes or not."""
        gap = self.first_gap(stop, start)
        return None if gap is None else gap[0]

    def first_gap(self, stop: int, start: int = 0, layers: Sequence[int] | None = None) -> Gap | None:
        """The first position in ``[start, stop)`` at which one of ``layers`` (all routed ones) is missing, and which.

        The layer is ``None`` where nothing of the row is known; of ``layers`` those without a router do not count.
        """
        if start >= stop:
            return None
        if not self.start <= start < self.stop:
            return start, None
        chosen = self.routed_layers if layers is None else layers
        at = slice(start - self.start, min(stop, self.stop) - self.start)
        whole = self.valid[at]
        if self._known is not None:
            known = self._known[at]
            whole, _ = cells.split(known[:, [n in chosen for n in self.layer_ids]])
            whole = whole & cells.some(whole, known)
        lost = [n for n in self.missing_layers if n in chosen]
        if whole.all() and not lost:
            return None if stop <= self.stop else (self.stop, None)
        row = 0 if lost else int(whole.argmin())
        here = self.known[at][row]
        lost += [n for n, there in zip(self.layer_ids, here, strict=True) if not there and n in chosen]
        return start + row, min(lost) if here.any() else None

    # ---------------------------------------------------------------- as a value

    def __len__(self) -> int:
        return len(self.ids)

    def __eq__(self, other: object) -> bool:
        """Equal positions, layers, versions, token hashes, masks and ids."""
        if not isinstance(other, RoutedCells):
            return NotImplemented
        names = ("start", "layer_ids", "missing_layers", "num_experts", "num_layers")
        return (
            all(getattr(self, n) == getattr(other, n) for n in (*names, "weights_versions", "token_hashes"))
            and np.array_equal(self.known, other.known)
            and np.array_equal(self.ids, other.ids)
        )

    __hash__ = None  # type: ignore[assignment]  # arrays inside: compared by value, never used as a key

    def __repr__(self) -> str:
        where = f"positions {self.start}..{self.stop - 1}" if len(self) else f"no positions at {self.start}"
        layers = f"{len(self.layer_ids)} of {self.num_layers} layers"
        some = self.some
        state = [f"{lost} missing"] if (lost := len(self) - int(np.count_nonzero(some))) else []
        if self._known is not None:
            partly = some & ~self.valid
            lacking = int(np.count_nonzero((~self._known[partly]).any(axis=0)))
            state.append(f"{_layers(lacking)} missing in {np.count_nonzero(partly)} rows")
        if self.missing_layers:
            state.append(f"{_layers(len(self.missing_layers))} missing in all rows")
        what = ", ".join(state) or "complete"
        return f"Routes({where}, {layers}, top {self.top_k} of {self.num_experts} experts, {what})"

    def _with(self, known: NDArray[np.bool_] | None = None, **fields: Any) -> Self:
        """These routes with other fields, checked before; arrays are taken over. ``known`` is a mask as given."""
        made = object.__new__(type(self))
        for name in RoutedCells.__slots__:
            object.__setattr__(made, name, fields.get(name, getattr(self, name)))
        if known is not None:
            valid, cellwise = cells.split(known)
            object.__setattr__(made, "valid", _read_only(valid))
            object.__setattr__(made, "_known", None if cellwise is None else _read_only(cellwise))
        _read_only(made.ids)
        return made

    def _set(self, *values: object) -> None:
        for name, value in zip(RoutedCells.__slots__, values, strict=True):
            object.__setattr__(self, name, value)


def check_alike(parts: Sequence[RoutedCells], what: str = "sample") -> None:
    """Raise :class:`RowError` that names ``what``, the field and both values unless ``parts`` are of one model."""
    for i, other in enumerate(parts):
        for name in ("routed_layers", "num_experts", "num_layers", "top_k"):
            if (wanted := getattr(parts[0], name)) != (got := getattr(other, name)):
                raise RowError(f"{what} {i} {name}", f"{wanted}, as {what} 0 has", got)


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array


def _layers(count: int) -> str:
    return f"{count} layer" if count == 1 else f"{count} layers"


__all__ = ["RoutedCells", "check_alike"]
