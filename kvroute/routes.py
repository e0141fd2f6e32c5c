"""What the trainer gets: the experts that each token's MoE layers chose, with nothing unknown left unsaid."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import RowError
from cache_manager.spec import AuxBlockDataSpec
from kvroute.routing import check_ids, routing_spec

Span = tuple[int, int]
"""Positions ``[start, stop)``."""

WeightsSpan = tuple[int, int, int]
"""Positions ``[start, stop)`` and the weights version that computed their rows."""


class RowsLike(Protocol):
    """Rows with their valid mask, as ``AuxBlocks.read`` answers them."""

    @property
    def ids(self) -> NDArray[Any]: ...  # [n, *row_shape]

    @property
    def valid(self) -> NDArray[np.bool_]: ...  # [n]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Routes:
    """The routing rows of the tokens at positions ``start .. start + n - 1`` of one sequence.

    ``ids[i, l, k]`` is the k-th expert that layer ``layer_ids[l]`` chose for position ``start + i``; it means
    something only where ``valid[i]``. The ids of a missing row are all ones in binary, whatever memory they came from.
    The dtype is always the narrowest unsigned one for ``num_experts``; both arrays are read-only copies that belong to
    the routes.

    ``weights_versions`` are ``(start, stop, version)`` by position: increasing, without overlap, inside the routes.
    Positions that no range covers have no known version.

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

    def __post_init__(self) -> None:
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
        kept = np.flatnonzero(valid)
        check_ids(ids if len(kept) == len(ids) else ids[kept], self.num_experts, self.layer_ids, kept + self.start)
        owned = np.full(ids.shape, np.iinfo(spec.dtype).max, dtype=spec.dtype)
        np.copyto(owned, ids, where=valid[:, None, None], casting="unsafe")  # every valid id fits: it was checked
        set_field(self, "ids", _read_only(owned))
        set_field(self, "valid", _read_only(valid.copy()))
        set_field(self, "weights_versions", _versions(self.weights_versions, self.start, self.stop))

    @classmethod
    def from_rows(
        cls,
        spec: AuxBlockDataSpec,
        rows: RowsLike,
        start: int = 0,
        *,
        weights_version: int | RowsLike | None = None,
    ) -> Routes:
        """Routes of what ``AuxBlocks.read`` answered for ``spec``; ``start`` is the position of the first row.

        ``weights_version`` is one version for all rows, or the rows of a ``weights_version`` spec for the same
        positions: their invalid rows have no known version.
        """
        if missing := [a for a in ("num_experts", "layer_ids", "num_layers") if a not in spec.attrs]:
            raise RowError(f"{spec.name} spec", "a routing spec", f"one without {', '.join(missing)}")
        ids = np.asarray(rows.ids)
        if ids.shape[1:] != spec.row_shape:
            raise RowError(f"{spec.name} rows", f"shape (n, {', '.join(map(str, spec.row_shape))})", ids.shape)
        versions: Iterable[WeightsSpan] = ()
        if isinstance(weights_version, (int, np.integer)):
            versions = ((start, start + len(ids), int(weights_version)),) if len(ids) else ()
        elif weights_version is not None:
            versions = _version_spans(weights_version, len(ids), start)
        return cls(
            ids,
            rows.valid,
            spec.attrs["layer_ids"],
            spec.attrs["num_experts"],
            spec.attrs["num_layers"],
            start,
            tuple(versions),
        )

    @classmethod
    def concat(cls, parts: Sequence[Routes]) -> Routes:
        """The routes of all ``parts``, each starting where the one before stops; at least one.

        Raises :class:`RowError` at a gap, an overlap, or parts of different layers or experts.
        """
        if not parts:
            raise RowError("parts", "at least one", "none")
        for before, after in pairwise(parts):
            for name in ("layer_ids", "num_experts", "num_layers", "top_k"):
                if getattr(before, name) != getattr(after, name):
                    raise RowError(f"routes.{name}", getattr(before, name), getattr(after, name))
            if after.start != before.stop:
                raise RowError("routes.start", f"position {before.stop}, where the part before stops", after.start)
        return parts[0]._with(
            np.concatenate([p.ids for p in parts]),
            np.concatenate([p.valid for p in parts]),
            parts[0].start,
            _joined(v for p in parts for v in p.weights_versions),
        )

    def append(self, other: Routes) -> Routes:
        """These routes and ``other``, which must start where these stop."""
        return Routes.concat((self, other))

    def slice(self, start: int, stop: int) -> Routes:
        """The routes of the *positions* ``[start, stop)``, sharing memory; they must lie inside these routes."""
        if not self.start <= start <= stop <= self.stop:
            raise RowError("slice", f"positions inside [{self.start}, {self.stop}]", f"[{start}, {stop})")
        clipped = ((max(a, start), min(b, stop), v) for a, b, v in self.weights_versions)
        at = np.s_[start - self.start : stop - self.start]
        return self._with(self.ids[at], self.valid[at], start, tuple(v for v in clipped if v[0] < v[1]))

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
        return tuple((self.start + a, self.start + b) for a, b in _runs(~self.valid))

    def __len__(self) -> int:
        return len(self.ids)

    def __eq__(self, other: object) -> bool:
        """Equal positions, layers, versions, valid masks and ids."""
        if not isinstance(other, Routes):
            return NotImplemented
        names = ("start", "layer_ids", "num_experts", "num_layers", "weights_versions")
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
    ) -> Routes:
        """Routes of rows that were checked before; the arrays are taken over."""
        made = object.__new__(Routes)
        fields = {
            "ids": _read_only(ids),
            "valid": _read_only(valid),
            "start": start,
            "weights_versions": versions,
            "layer_ids": self.layer_ids,
            "num_experts": self.num_experts,
            "num_layers": self.num_layers,
        }
        for name, value in fields.items():
            object.__setattr__(made, name, value)
        return made


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array


def _runs(mask: NDArray[np.bool_]) -> list[Span]:
    """The maximal ranges in which ``mask`` is true."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).view(np.int8)))
    return [(a, b) for a, b in edges.reshape(-1, 2).tolist()]


def _versions(versions: Iterable[WeightsSpan], start: int, stop: int) -> tuple[WeightsSpan, ...]:
    spans: list[WeightsSpan] = []
    for span in versions:
        if len(span) != 3 or not all(isinstance(v, (int, np.integer)) and v >= 0 for v in span):
            raise RowError("routes.weights_versions", "(start, stop, version), integers of 0 or more", repr(span))
        a, b, version = (int(v) for v in span)
        if not start <= a < b <= stop:
            raise RowError("routes.weights_versions", f"ranges inside [{start}, {stop})", f"[{a}, {b})")
        if spans and a < spans[-1][1]:
            raise RowError("routes.weights_versions", f"a range that starts at {spans[-1][1]} or later", f"[{a}, {b})")
        spans.append((a, b, version))
    return _joined(spans)


def _joined(spans: Iterable[WeightsSpan]) -> tuple[WeightsSpan, ...]:
    """``spans`` with neighbours of one version made one, so that equal versions are equal tuples."""
    joined: list[WeightsSpan] = []
    for a, b, version in spans:
        if joined and joined[-1][1] == a and joined[-1][2] == version:
            joined[-1] = (joined[-1][0], b, version)
        else:
            joined.append((a, b, version))
    return tuple(joined)


def _version_spans(per_token: RowsLike, rows: int, start: int) -> list[WeightsSpan]:
    """The ranges of equal, valid versions among ``rows`` rows that say one each."""
    versions, valid = np.asarray(per_token.ids), np.asarray(per_token.valid)
    if versions.shape != (rows,) or valid.shape != (rows,) or versions.dtype.kind not in "iu":
        raise RowError("weights_version rows", f"integers of shape {(rows,)}", f"{versions.dtype} {versions.shape}")
    changes = np.flatnonzero(np.diff(versions)) + 1
    bounds = [0, *changes.tolist(), rows]
    return [
        (start + a + first, start + a + last, int(versions[a]))
        for a, b in pairwise(bounds)
        for first, last in _runs(valid[a:b])
    ]
