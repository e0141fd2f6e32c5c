"""kvroute's lines in vLLM's log.

vLLM sets up its own loggers alone: of ours Python would show warnings only, without time and process.
"""

from __future__ import annotations

import logging
from typing import Final

OUR_LOGGERS: Final = ("kvroute", "transfer", "cache_manager")


def join_logging(theirs: str = "vllm") -> None:
    """Our loggers write where the logger ``theirs`` does, unless they have handlers, or those of the root show as much.

    A library that gives the root logger a handler, and leaves its level, is not somebody who has set up logging. That
    handler gets none of our lines: they would be there twice, as the root's level does not hold for lines from below.
    """
    vllm, root = logging.getLogger(theirs), logging.getLogger()
    if root.handlers and root.level <= vllm.level:
        return
    for name in OUR_LOGGERS:
        logger = logging.getLogger(name)
        if not logger.handlers:
            logger.handlers = list(vllm.handlers)
            logger.setLevel(vllm.level)
            logger.propagate = vllm.propagate


__all__ = ["join_logging"]
