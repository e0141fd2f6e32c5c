"""Rollouts that nobody stores: the handle carries the rows, and goes into the answer to the request."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

import numpy as np

from cache_manager.errors import InvalidInputError
from cache_manager.ports import Absence
from cache_manager.storage.url import StoreUrl
from kvroute.rollout.grid import Range, Selection
from kvroute.rollout.handle import PUT_ID_NBYTES, RolloutHandle
from kvroute.rollout.ids import checked_id
from kvroute.rollout.port import CountingStore
from kvroute.rollout.settings import CutSettings
from kvroute.routes import Routes

SCHEME: Final = "response"


class ResponseRollouts(CountingStore):
    """A ``RolloutStore`` that keeps nothing: ``find`` answers ``None``, and deleting changes nothing.

    The rows are in ``handle.inline``, as :meth:`Routes.to_bytes` has them.
    """

    def __init__(self) -> None:
        super().__init__("the rollout store")

    def put(self, rollout_id: str, routes: Routes) -> RolloutHandle:
        self._check_open()
        checked_id(rollout_id)
        grid, inline = CutSettings(fused=True).grid(routes), routes.to_bytes()
        self._count(puts=1, put_nbytes=routes.ids.nbytes)
        return RolloutHandle.of(SCHEME, rollout_id, os.urandom(PUT_ID_NBYTES), routes, grid, inline=inline)

    def find(self, rollout_id: str) -> RolloutHandle | None:
        self._check_open()
        checked_id(rollout_id)
        return None

    def get(
        self, handle: RolloutHandle, layers: Sequence[int] | None = None, spans: Sequence[Range] | None = None
    ) -> list[Routes] | Absence:
        self._check_open()
        wanted = Selection.of(handle.layer_ids, (handle.start, handle.stop), layers, spans)
        if not handle.inline:
            return self._absent(Absence.MISS)
        try:
            routes = Routes.from_bytes(handle.inline, checked=True)
            for name in ("start", "stop", "layer_ids", "missing_layers", "num_layers", "num_experts", "top_k"):
                if getattr(routes, name) != getattr(handle, name):
                    raise InvalidInputError(f"inline {name}", getattr(handle, name), getattr(routes, name))
        except InvalidInputError:
            return self._absent(Absence.CORRUPT)
        self._count(hits=1, get_nbytes=routes.ids.nbytes)
        return [
            layers_of(routes.slice(handle.start + first, handle.start + last), wanted.layers)
            for first, last in wanted.rows
        ]

    def delete(self, handle: RolloutHandle) -> None:
        self._check_open()
        checked_id(handle.rollout_id)
        self._count(deletes=1)

    def flush(self) -> None:
        self._check_open()

    def close(self) -> None:
        self._closed = True


def layers_of(routes: Routes, layers: Sequence[int]) -> Routes:
    """``routes`` of the layers with these indices only; their other layers are missing ones."""
    if len(layers) == len(routes.layer_ids):
        return routes
    return Routes.checked(
        routes.layout.only(tuple(routes.layer_ids[i] for i in layers)),
        np.ascontiguousarray(routes.ids[:, list(layers)]),
        routes.mask[:, list(layers)] if routes.mask.ndim == 2 else routes.mask,
        routes.start,
        routes.weights_versions,
        routes.token_hashes,
    )


def open_response_rollouts(url: StoreUrl) -> ResponseRollouts:
    """``response:``."""
    url.allow()
    return ResponseRollouts()


__all__ = ["ResponseRollouts", "layers_of", "open_response_rollouts"]
