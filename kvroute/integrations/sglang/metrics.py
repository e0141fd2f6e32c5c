"""kvroute's numbers among SGLang's own at ``/metrics``."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvroute.connector.meter import Exported
from kvroute.integrations.sglang.capturer import capturer


def export(scheduler: Any) -> None:
    """A scheduler is there: if it has metrics (``--enable-metrics``) and this process has rows, their numbers join.

    They have SGLang's own labels, and are of its kinds of metrics: those of ``prometheus_client``, which hands them to
    the server's process through files, unless a class of the operator has others.
    """
    rows, collector = capturer(), getattr(scheduler, "metrics_collector", None)
    if rows is None or collector is None or not rows.answers:  # SGLang counts on the first of ranks alone
        return
    import prometheus_client  # type: ignore[import-not-found,unused-ignore]

    kinds = (
        getattr(collector, "_counter_cls", None) or prometheus_client.Counter,
        getattr(collector, "_histogram_cls", None) or prometheus_client.Histogram,
    )
    exported = Exported(kinds, list(collector.labels))
    rows.rows.exports = partial(exported.observe, values=list(collector.labels.values()))


__all__ = ["export"]
