"""kvroute inside SGLang, without a fork: its routed experts are right even for loaded KV. See ``docs/sglang.md``.

A client needs :func:`routes`, :func:`routing_weights` for ids and weights, and for what tokens were drawn from
:func:`support`, and neither SGLang nor torch.
"""

from __future__ import annotations

from typing import Any

from kvroute.connector import missing, routes, routing_weights, support, unseen


def register() -> None:
    """The plugin, called by SGLang in each of its processes before its engine starts."""
    from kvroute.integrations.sglang.plugin import register_door

    register_door()


def __getattr__(name: str) -> Any:
    if name != "KvrouteLinker":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvroute.integrations.sglang.linker import KvrouteLinker

    return KvrouteLinker


__all__ = ["missing", "register", "routes", "routing_weights", "support", "unseen"]
