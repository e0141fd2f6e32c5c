"""The rows of a request that SGLang retracts: they go aside with a copy of its KV, and come back with that."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from cache_manager.publish import Rows
from kvroute.connector.settings import VERSION
from kvroute.integrations.sglang.passes import Ids
from kvroute.integrations.sglang.rows import RoutedRows
from kvroute.routing import ROUTING_WEIGHTS


class Aside:
    """The rows of a request's first tokens while SGLang has no slots for them. A new one has none."""

    def __init__(self) -> None:
        self._kept: tuple[Rows, Rows, Rows | None] | None = None  # with their labels, and routing weights if wanted

    def keep(self, rows: RoutedRows, slots: Ids) -> None:
        """SGLang copies the KV in ``slots [n]`` aside, and gives their pages away: the rows go with it, when the passes
        launched so far are over."""

        def keep() -> None:
            pages = slots[:: rows.page] // rows.page
            ids = rows.aux.read(rows.spec.name, pages, 0, len(slots))
            labels = rows.aux.read(VERSION, pages, 0, len(slots))
            weights = rows.read_weights(ids, pages, 0, len(slots))
            self._kept = ids, labels, weights

        rows.passes.then(keep)

    def bring_back(self, rows: RoutedRows, slots: Ids) -> None:
        """What was put aside comes into ``slots [n]``, whose pages were given out for it."""

        def write() -> None:
            if self._kept is None:  # the weights were new before it could be read
                return
            ids, labels, weights = self._kept
            for chosen in (ids.valid & labels.valid, ids.valid & ~labels.valid):
                values: dict[str, NDArray[Any]] = {rows.spec.name: ids.values[chosen]}
                if weights is not None:
                    values[ROUTING_WEIGHTS] = weights.values[chosen]
                if (labels.valid & chosen).any():
                    values[VERSION] = labels.values[chosen]
                rows.aux.write_step(slots[chosen], values)

        rows.came(slots[:: rows.page] // rows.page, write)


__all__ = ["Aside"]
