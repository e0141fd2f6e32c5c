"""Pages on the host of SGLang up to 0.5.16, which later releases keep in another tree: hooks of what differs.

There a model whose layers attend to all tokens has its pages in ``HiRadixCache``, by ``HiCacheController``: that is
followed. Other models, and other trees, have a controller that is made of this one and copies pages by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from cache_manager.errors import ConfigError
from kvroute.integrations.sglang.capturer import Capturer
from kvroute.integrations.sglang.host_pages import attached

FOLLOWED: Final = "HiCacheController"


def hosted(current: Capturer, _: None, controller: Any, *__: Any, **___: Any) -> None:
    """SGLang has pages on the host, and maybe a storage behind them.

    Raises :class:`ConfigError` for a controller whose copies of pages no hook follows.
    """
    kind = type(controller).__name__
    if kind != FOLLOWED:
        raise ConfigError(
            "SGLang with kvroute: enable_hierarchical_cache",
            f"a model whose layers attend to all tokens, with a {FOLLOWED}: in this release no hook follows others",
            kind,
        )
    attached(current.rows, controller, controller.mem_pool_host)


def found(current: Capturer, hit: Any, controller: Any, *_: Any, **__: Any) -> Any:
    """The storage has KV of ``hit``, pages' keys and tokens: cut off the part without rows. The controller's thread
    calls it."""
    if current.rows.kv_origins is None:
        return hit
    keys, tokens = hit
    n = current.rows.stored(keys)
    return keys[:n], min(tokens, n * controller.page_size)


def prefetched(
    current: Capturer, _tree: Any, _node: Any, _key: Any, host_value: Any, hash_value: Sequence[str]
) -> None:
    """Pages have come to the host from the storage, also from one that was attached later; the tree takes them."""
    if len(host_value):
        current.rows.loaded(hash_value, current.rows.pages_of(host_value, host=True))


__all__ = ["FOLLOWED", "found", "hosted", "prefetched"]
