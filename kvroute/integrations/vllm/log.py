"""kvroute's lines in vLLM's log.

vLLM sets up its own loggers alone: of ours Python would show warnings only, without time and process.
"""

from __future__ import annotations

import logging
from typing import Final

OURS: Final = ("kvroute", "transfer", "cache_manager")


def join(theirs: str = "vllm") -> None:
    """Our loggers write where the logger ``theirs`` writes, unless somebody has set up the root logger or ours."""
    vllm = logging.getLogger(theirs)
    if logging.getLogger().handlers:
        return
    for name in OURS:
        logger = logging.getLogger(name)
        if not logger.handlers:
            logger.handlers = list(vllm.handlers)
            logger.setLevel(vllm.level)


__all__ = ["join"]
