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
        inner, other_inner = self.data[INNER], other.data[INNER]
        both = inner.aggregate(other_inner) if inner and other_inner else inner or other_inner
        return Stats(merged(self.data[OURS], other.data[OURS]), both)

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log: only tokens without rows; the rest is at ``/metrics``."""
        inside = self.data[INNER]
        counts = {f"tokens without rows ({why})": n for why, n in self.data[OURS].get(WITHOUT_ROWS, {}).items()}
        return {**counts, **(inside.reduce() if inside and not inside.is_empty() else {})}

    def is_empty(self) -> bool:
        return not any(self.data[OURS].values()) and (not self.data[INNER] or self.data[INNER].is_empty())


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
        if self._inner is not None and transfer_stats_data.get(INNER):
            self._inner.observe(transfer_stats_data[INNER], engine_idx)
        self._exported.observe(transfer_stats_data[OURS], self.per_engine_labelvalues[engine_idx])


__all__ = ["PromMetrics", "Stats"]
