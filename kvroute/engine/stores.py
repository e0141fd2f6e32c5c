"""Where a restarted engine finds what an earlier one computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

from cache_manager.ports import StorageBackend
from cache_manager.storage import open_store


@dataclass(frozen=True, slots=True)
class EngineStores:
    """A store for rows and one for KV: records of a store have one size, and a block is found in both by one key."""

    rows: StorageBackend
    kv: StorageBackend

    @classmethod
    def open(cls, url: str) -> Self:
        """Open both at ``url``, in the directories ``rows`` and ``kv`` where it names a place. See ``open_store``."""
        rows = open_store(below(url, "rows"))
        try:
            return cls(rows, open_store(below(url, "kv")))
        except BaseException:
            rows.close()
            raise

    def flush(self) -> None:
        self.kv.flush()
        self.rows.flush()

    def close(self) -> None:
        self.kv.close()
        self.rows.close()


def tiers(url: str) -> list[str]:
    """The stores that ``url`` is made of, which is one, or those of a tiered store after its own parameters.

    >>> tiers("tiered:?queue=64MiB,file:///a,mooncake://h:1/x")
    ['?queue=64MiB', 'file:///a', 'mooncake://h:1/x']
    """
    scheme, _, rest = url.partition(":")
    return rest.split(",") if scheme == "tiered" else [url]


def below(url: str, name: str) -> str:
    """The store called ``name`` at ``url``, in each of the places that it names; parameters stay as they are.

    >>> below("file:///var/kv?quota=1GiB", "rows"), below("memory:?capacity=1GiB", "rows")
    ('file:///var/kv/rows?quota=1GiB', 'memory:?capacity=1GiB')
    >>> below("tiered:?queue=64MiB,file:///a,mooncake://h:1/x?host=h", "kv")
    'tiered:?queue=64MiB,file:///a/kv,mooncake://h:1/x/kv?host=h'
    """
    if url.startswith("tiered:"):
        return "tiered:" + ",".join(below(tier, name) for tier in tiers(url))
    parts = urlsplit(url)
    if not parts.netloc and not parts.path:  # one that is not in a place
        return url
    return parts._replace(path=f"{parts.path.rstrip('/')}/{name}").geturl()
