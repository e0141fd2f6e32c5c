"""kvroute inside vLLM, without a fork: a KV connector that keeps the routing rows with the KV. See ``docs/vllm.md``.

An engine finds ``KvrouteConnector`` here by its configuration (``kv_connector_module_path``). Any other name
``Kvroute<X>`` is that same connector around vLLM's own connector ``<X>``: ``KvrouteNixlConnector`` moves KV as
``NixlConnector`` does. ``Kvroute<module>:<X>`` wraps a connector that vLLM does not know by name.

A client needs :func:`routes`, :func:`routing_weights` for ids and weights, :func:`support` for what tokens were drawn
from, :func:`mtp_routes` for an MTP layer's choices, :func:`gathered` for a stream, and for the key of one of several
completions :func:`choice_key`, but neither vLLM nor torch.
"""

from __future__ import annotations

from typing import Any

from kvroute.connector import (
    choice_key,
    gathered,
    missing,
    mtp_missing,
    mtp_routes,
    routes,
    routing_weights,
    support,
    unseen,
)
from kvroute.integrations.vllm.versions import PREFIX


def __getattr__(name: str) -> Any:
    if not name.startswith(PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvroute.integrations.vllm.connector import connector_class

    globals()[name] = connector = connector_class(name.removeprefix(PREFIX))
    return connector


__all__ = [
    "choice_key",
    "gathered",
    "missing",
    "mtp_missing",
    "mtp_routes",
    "routes",
    "routing_weights",
    "support",
    "unseen",
]
