"""kvroute inside SGLang, without a fork: its routed experts, right also where KV was loaded. See ``docs/sglang.md``.

SGLang calls :func:`register` in each of its processes (entry point group ``sglang.srt.plugins``); with
``--enable-return-routed-experts`` the rows of its tokens are kept by kvroute then. ``KvrouteLinker`` is an external
linker that keeps KV pages and their rows in a store of kvroute, each page with its rows as one record. Where another
linker or a storage of SGLang's keeps the KV, kvroute keeps the rows, and compares when both have come back.

A client needs :func:`routes`, and neither SGLang nor torch.
"""

from __future__ import annotations

from typing import Any

from kvroute.connector import missing, routes, unseen


def register() -> None:
    """The plugin: hooks are applied by SGLang before its engine starts."""
    from kvroute.integrations.sglang.plugin import register_hooks

    register_hooks()


def __getattr__(name: str) -> Any:
    if name != "KvrouteLinker":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvroute.integrations.sglang.linker import KvrouteLinker

    return KvrouteLinker


__all__ = ["missing", "register", "routes", "unseen"]
