"""kvroute's own encoding: :meth:`Routes.to_json`, a JSON object that says all about itself, with a checksum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cache_manager.errors import RowError
from cache_manager.spec import AuxBlockDataSpec
from kvroute.encodings.arrays import FIELD
from kvroute.routes import Routes


def encode(routes: Routes) -> dict[str, Any]:
    return routes.to_json()


def decode(given: Mapping[str, Any], spec: AuxBlockDataSpec | None = None, _start: int = 0) -> Routes:
    """The routes that :func:`encode` was given. :class:`RowError` for anything else, whatever it is.

    The object says everything itself, its start too; of a ``spec`` it has to say the same.
    """
    routes = Routes.from_json(given)
    if spec is not None:
        for name, of in (("routed_layers", "layer_ids"), ("num_experts",) * 2, ("num_layers",) * 2):
            if getattr(routes, name) != spec.attrs[of]:
                raise RowError(f"{FIELD}.{name}", f"{spec.attrs[of]}, as the model has", getattr(routes, name))
        if routes.top_k != spec.row_shape[1]:
            raise RowError(f"{FIELD}.top_k", f"{spec.row_shape[1]}, as the model has", routes.top_k)
    return routes


def refusal(_routes: Routes) -> str | None:
    """Nothing: there is a mask for missing rows, and a dtype for every number of experts."""
    return None


__all__ = ["decode", "encode", "refusal"]
