"""Experts that compute nothing (LongCat): which of them a router chose, before it puts expert 0 in their place.

vLLM's router for them asks a function of its module for the top-k, writes 0 over each id of such an expert, and then
calls its hook. So the function is asked through :class:`Chosen`, which keeps a copy of what it returned, and the hook
takes that copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

ZERO_EXPERT_ROUTER: Final = "ZeroExpertRouter"
"""The name of vLLM's class."""


class Chosen:
    """Calls ``choose``, which returns the weights and ids of the top-k, and keeps a copy of the ids.

    A router calls its hook right after its own question, in the same thread, so that one place is enough for all.
    """

    def __init__(self, choose: Callable[..., tuple[Any, Any]]) -> None:
        self._choose = choose
        self._ids: Any = None

    def __call__(self, *arguments: Any, **more: Any) -> tuple[Any, Any]:
        weights, ids = self._choose(*arguments, **more)
        self._ids = ids.clone()
        return weights, ids

    def taken(self) -> Any:
        """The ids ``[tokens, top_k]`` of the last call; ``None`` if they were taken, or none was made."""
        ids, self._ids = self._ids, None
        return ids


def hook_as_chosen(capture: Callable[[Any], None]) -> Callable[[Any], None]:
    """A hook for such a router: it calls ``capture`` with the ids as they were chosen, in place of those it gets.

    Where the router has asked in another way, ``capture`` is not called: its rows are missing, with the reason.
    """
    from vllm.model_executor.layers.fused_moe.router import zero_expert_router  # type: ignore[import-not-found]

    chosen = zero_expert_router.fused_topk_bias
    if not isinstance(chosen, Chosen):
        chosen = Chosen(chosen)
        zero_expert_router.fused_topk_bias = chosen

    def as_chosen(masked: Any) -> None:
        ids = chosen.taken()
        if ids is not None and ids.shape == masked.shape:
            capture(ids)

    return as_chosen


__all__ = ["ZERO_EXPERT_ROUTER", "Chosen", "hook_as_chosen"]
