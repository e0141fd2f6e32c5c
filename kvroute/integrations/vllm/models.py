"""The plugin of kvroute, which vLLM calls in each of its processes, before there is a configuration."""

from __future__ import annotations

from kvroute.integrations.vllm.field import take_over


def register() -> None:
    """A look at each configuration that is made is the only change to vLLM in a process whose configuration does not
    name kvroute; a second call is harmless."""
    take_over()


__all__ = ["register"]
