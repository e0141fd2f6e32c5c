"""kvroute's numbers among vLLM's own at ``/metrics``, and beside those of the connector inside."""

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY  # type: ignore[import-not-found,unused-ignore]
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (  # type: ignore[import-not-found]
    Counter,
    Histogram,
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvroute.connector.meter import WITHOUT_ROWS, Exported, Taken, merged

OURS, INNER = "kvroute", "inner"


class Stats(KVConnectorStats):  # type: ignore[misc]
    """``data``: a meter's take, and the statistics of the connector ``inside`` in its own class."""

    data: dict[str, Any]

    def __init__(self, ours: Taken, inside: Any = None) -> None:
        super().__init__({OURS: ours, INNER: inside})

    def to_dict(self) -> dict[str, Any]:
        inside = self.data[INNER]
        return {OURS: self.data[OURS], INNER: inside and inside.to_dict()}

    def reset(self) -> None:
        self.data = {OURS: {}, INNER: None}

    def aggregate(self, other: KVConnectorStats) -> Stats:
        ours = merged(self.data[OURS], other.data[OURS])
        inner = self.data[INNER]
        other_inner = other.data[INNER]
        if inner and other_inner:
            return Stats(ours, inner.aggregate(other_inner))
        return Stats(ours, inner or other_inner)

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log: only tokens without rows; the rest is at ``/metrics``."""
        inside = self.data[INNER]
        missing = self.data[OURS].get(WITHOUT_ROWS, {})
        counts = {f"tokens without rows ({why})": n for why, n in missing.items()}
        if inside and not inside.is_empty():
            counts |= inside.reduce()
        return counts

    def is_empty(self) -> bool:
        inside = self.data[INNER]
        ours = any(self.data[OURS].values())
        return not ours and (not inside or inside.is_empty())


class PromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """kvroute's metrics, registered where vLLM registers its own."""

    def __init__(self, inner: Any, config: Any, types: Any, labels: list[str], engines: dict[int, list[Any]]) -> None:
        super().__init__(config, types, labels, engines)
        self._inner = inner
        for earlier in list(REGISTRY._collector_to_names):  # of an earlier engine in this process, as vLLM does
            if getattr(earlier, "_name", "").startswith(f"{OURS}:"):
                REGISTRY.unregister(earlier)
        self._exported = Exported((types[Counter], types[Histogram]), labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        inner = transfer_stats_data.get(INNER)
        if self._inner is not None and inner:
            self._inner.observe(inner, engine_idx)
        labels = self.per_engine_labelvalues[engine_idx]
        self._exported.observe(transfer_stats_data[OURS], labels)


__all__ = ["PromMetrics", "Stats"]
