"""``/metrics``: every counter with what it is a part of, and gauges of what is held now. No ratios: the reader divides.

Numbers come from the counter dataclasses of the parts, read when somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(slots=True)
class HttpCounters:
    """Requests of the server's own job by how they ended: ``requests`` is the sum of the others and those in flight."""

    requests: int = 0
    completed: int = 0
    bad_requests: int = 0
    refused: int = 0
    failed: int = 0
    timeouts: int = 0
    disconnects: int = 0


@dataclass(slots=True)
class Sources:
    """Where the numbers come from: counters by the part that they belong to, gauges by name with their label values."""

    counters: dict[str, Callable[[], object | None]] = field(default_factory=dict)
    gauges: dict[str, tuple[str, str, Callable[[], Mapping[str, float]]]] = field(default_factory=dict)

    def count(self, part: str, read: Callable[[], object | None]) -> None:
        """``read`` answers a dataclass of integers that only grow, or ``None`` for none at the moment."""
        self.counters[part] = read

    def gauge(self, name: str, doc: str, label: str, read: Callable[[], Mapping[str, float]]) -> None:
        """``read`` answers a value for each value of ``label``."""
        self.gauges[name] = (doc, label, read)

    def exposition(self) -> bytes:
        """All of it in Prometheus' text format."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(self))
        return generate_latest(registry)


class _Collector(Collector):
    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        for part, read in self._sources.counters.items():
            counters: Any = read()
            if counters is not None:
                for f in fields(counters):
                    words = f.name.replace("_", " ")
                    name = f"kvroute_{part}_{f.name}"
                    yield CounterMetricFamily(name, f"{words} ({part}).", value=getattr(counters, f.name))
        for name, (doc, label, gauge) in self._sources.gauges.items():
            family = GaugeMetricFamily(f"kvroute_{name}", doc, labels=[label])
            for value, number in gauge().items():
                family.add_metric([value], number)
            yield family


__all__ = ["CONTENT_TYPE", "HttpCounters", "Sources"]
