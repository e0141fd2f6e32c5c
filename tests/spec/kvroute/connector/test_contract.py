"""The contract of an engine with a connector: small engines of ours, before a worker that is behind its device, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvroute.testing.connector import LoadingContract, Routers
from kvroute.testing.small_engine import SmallEngine


class TestSmallEngine(LoadingContract):
    """Of an engine whose host does all of a step at once."""

    def make_engine(
        self, routers: Routers, settings: Mapping[str, Any], outside: dict[bytes, Any] | None = None
    ) -> SmallEngine:
        return SmallEngine(routers, settings, outside)


class TestSmallEngineBehindADevice(LoadingContract):
    """Of an engine whose host is behind, whose pool is so small that requests are preempted for each other, and whose
    KV comes between steps."""

    def make_engine(
        self, routers: Routers, settings: Mapping[str, Any], outside: dict[bytes, Any] | None = None
    ) -> SmallEngine:
        return SmallEngine(routers, settings, outside, blocks=12, late=True, later=True)
