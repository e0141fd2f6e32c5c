"""``kvroute prefill``, ``decode`` and ``front``: one server in this process until it is told to end."""

from __future__ import annotations

import asyncio
import logging
import sys

from paged_engine.serving.config import DecodeConfig, FrontConfig, PrefillConfig, ServerConfig
from paged_engine.serving.server import Server


def serve(config: ServerConfig) -> int:
    """Serve until SIGTERM or SIGINT, and end cleanly; the exit status."""
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    asyncio.run(_made(config).run())
    return 0


def _made(config: ServerConfig) -> Server:
    match config:
        case PrefillConfig():
            from paged_engine.serving.prefill import PrefillServer

            return PrefillServer(config)
        case DecodeConfig():
            from paged_engine.serving.decode import DecodeServer

            return DecodeServer(config)
        case FrontConfig():
            from paged_engine.serving.front import FrontServer

            return FrontServer(config)
        case _:
            raise AssertionError(config)


__all__ = ["serve"]
