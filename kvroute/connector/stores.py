"""The store of rows as an engine opens it: its writer may start later."""

from __future__ import annotations

import logging

import kvroute
from cache_manager.errors import StoreMissingError
from cache_manager.ports import StorageBackend

logger = logging.getLogger(__name__)


def opened(url: str) -> StorageBackend:
    """The store at ``url``; a file store that is only read may be made later, and has nothing until then.

    Unless the URL says ``absent`` itself. Raises what ``open_store`` raises else.
    """
    try:
        return kvroute.open_store(url)
    except StoreMissingError as error:
        if not url.startswith("file:") or "absent=" in url:
            raise
        logger.warning("%s; until then it has no rows for this engine", error)
        return kvroute.open_store(f"{url}&absent=wait")


__all__ = ["opened"]
