"""The layout of a model's rows: their layers, the number of experts, and how many of them a layer chooses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, Protocol, Self

import msgspec
import numpy as np

from cache_manager.errors import RowError
from cache_manager.spec import AuxBlockDataSpec
from kvroute.routing import id_dtype, routing_spec

Layers = Literal["all", "moe"] | Sequence[int]
"""Every layer of the model; those with a router; or these layer ids, in this order."""

_MODEL_FIELDS: Final = ("routed_layers", "num_experts", "num_layers", "top_k")


class Layout(msgspec.Struct, frozen=True, cache_hash=True, forbid_unknown_fields=True):
    """A layer of the model is in ``layer_ids`` (its ids are there), in ``missing_layers`` (it has a router, but no ids
    here), or dense: then it is in neither. Raises :class:`SpecError` and :class:`RowError` for fields that no model
    has.
    """

    layer_ids: tuple[int, ...]
    num_experts: int
    num_layers: int
    top_k: int
    missing_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # The spec checks layers, experts and top-k.
        spec = routing_spec(self.num_experts, self.top_k, self.layer_ids, self.num_layers, block_tokens=1)
        plain = {**spec.attrs, "top_k": spec.row_shape[1]}
        lost = self.missing_layers
        if lost:
            ids = _distinct("routes.missing_layers", lost, plain["num_layers"], plain["layer_ids"])
            plain["missing_layers"] = tuple(sorted(ids))
        for name, value in plain.items():
            msgspec.structs.force_setattr(self, name, value)

    @classmethod
    def of(cls, spec: AuxBlockDataSpec, missing_layers: Iterable[int] = ()) -> Self:
        """The layout of rows of ``spec``; :class:`RowError` if that is not one of routing."""
        attrs = spec.attrs
        lacking = [name for name in ("num_experts", "layer_ids", "num_layers") if name not in attrs]
        if lacking:
            wanted = "a routing spec"
            got = f"one without {', '.join(lacking)}"
            raise RowError(f"{spec.name} spec", wanted, got)
        top_k = spec.row_shape[1]
        return cls(attrs["layer_ids"], attrs["num_experts"], attrs["num_layers"], top_k, tuple(missing_layers))

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """The model's layers with a router, increasing."""
        return tuple(sorted((*self.layer_ids, *self.missing_layers))) if self.missing_layers else self.layer_ids

    @property
    def dtype(self) -> np.dtype[Any]:
        """The narrowest unsigned dtype that holds every id."""
        return np.dtype(id_dtype(self.num_experts))

    @property
    def cell_nbytes(self) -> int:
        """Bytes of the ids of one token in one layer."""
        return self.top_k * self.dtype.itemsize

    def only(self, layer_ids: tuple[int, ...]) -> Layout:
        """This layout with ids of these routed layers only; the other routed layers are missing."""
        if layer_ids == self.layer_ids:
            return self
        missing = tuple(sorted(set(self.routed_layers).difference(layer_ids)))
        return Layout(layer_ids, self.num_experts, self.num_layers, self.top_k, missing)

    def check_model(
        self,
        layout: Layout,
        subject: str = "routes",
        why: str = "as the model has",
    ) -> None:
        """Raise :class:`RowError` that names ``subject`` and the field unless ``layout`` is of the same model."""
        for name in () if layout is self else _MODEL_FIELDS:
            wanted = getattr(self, name)
            if wanted != (got := getattr(layout, name)):
                raise RowError(f"{subject} {name}", f"{wanted}, {why}", got)

    def chosen(self, layers: Layers) -> tuple[int, ...]:
        """The layer ids that ``layers`` means; :class:`RowError` for one that the model does not have, or twice."""
        if isinstance(layers, str):
            if layers not in ("all", "moe"):
                wanted = "all, moe or a sequence of layer ids"
                raise RowError("layers", wanted, repr(layers))
            return tuple(range(self.num_layers)) if layers == "all" else self.routed_layers
        return _distinct("layers", layers, self.num_layers)


def _distinct(
    field: str,
    layers: Iterable[int],
    num_layers: int,
    but: Sequence[int] = (),
) -> tuple[int, ...]:
    """``layers``, distinct and in range; a hostile record makes neither this check nor its error long."""
    layer_ids = tuple(layers)
    sound = all(isinstance(layer, (int, np.integer)) and 0 <= layer < num_layers for layer in layer_ids)
    if not sound or len(set(layer_ids)) < len(layer_ids) or not set(layer_ids).isdisjoint(but):
        beside = ", and none of layer_ids" if but else ""
        wanted = f"distinct ones of the layers [0, {num_layers}){beside}"
        raise RowError(field, wanted, repr(layer_ids[:8])[:200])
    return tuple(map(int, layer_ids))


class HasLayout(Protocol):
    @property
    def layout(self) -> Layout: ...


def check_alike(parts: Sequence[HasLayout], subject: str = "sample") -> None:
    """Raise :class:`RowError` that names ``subject``, the field and both values unless ``parts`` are of one model.

    The same for something that is no routes, as ``None`` for a sample without rows.
    """
    for i, part in enumerate(parts):
        if not isinstance(getattr(part, "layout", None), Layout):
            wanted = f"routes, with no rows for a {subject} that has none"
            raise RowError(f"{subject} {i}", wanted, type(part).__name__)
        if part.layout is not parts[0].layout:
            parts[0].layout.check_model(part.layout, f"{subject} {i}", f"as {subject} 0 has")
