"""SGLang's pages on the host: their KV, which names the computation of their rows."""

from __future__ import annotations

from typing import Any, Final

from cache_manager.errors import ConfigError
from kvroute.connector.witness import KvFolder, witnesses
from kvroute.integrations.sglang.pools import halves_of

LAYOUTS: Final = ("layer_first", "page_first", "page_first_direct")


def host_folder(pool: Any) -> KvFolder:
    """A folder of SGLang's pages on the host; :class:`ConfigError` for a layout whose layers are not separate."""
    if pool.layout not in LAYOUTS:
        raise ConfigError("hicache_mem_layout", " or ".join(LAYOUTS), pool.layout)
    by_half = [half.unbind(0 if pool.layout == "layer_first" else 1) for half in halves_of(pool)]
    if pool.layout != "page_first_direct":  # slots
        by_half = [[kv.unflatten(0, (-1, pool.page_size)) for kv in half] for half in by_half]
    return KvFolder(witnesses([list(layer) for layer in zip(*by_half, strict=True)], pool.dtype.itemsize))


def attached(rows: Any, controller: Any, pool: Any) -> None:
    """``rows`` follow the pages of SGLang's ``controller``, which are in its ``pool`` on the host."""
    folder = host_folder(pool) if controller.enable_storage else None
    rows.attach(folder=folder, host_pages=-(-pool.size // pool.page_size) + 1)


__all__ = ["LAYOUTS", "attached", "host_folder"]
