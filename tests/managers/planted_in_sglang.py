"""SGLang's radix tree and allocator, and the rows beside them, with one fault each: the rest is as it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from finding import Planted
from sglang_radix_cache import Sglang

from cache_manager.testing.life import CanaryKV

PLANTED: list[Planted] = []


def planted(reports: str, *claims: str) -> Callable[[Callable[[Any], None]], None]:
    def register(plant: Callable[[Any], None]) -> None:
        def __init__(self: Sglang, kv: CanaryKV) -> None:  # noqa: N807 - of the class that is made below
            Sglang.__init__(self, kv)
            plant(self)

        name = "".join(word.title() for word in plant.__name__.split("_"))
        adapter = type(name, (Sglang,), {"__init__": __init__, "__doc__": plant.__doc__})
        PLANTED.append(Planted(adapter, reports, frozenset(claims)))

    return register


@planted("-", "rows_follow_kv", "reset_forgets")
def renews_rows_once(manager: Any) -> None:
    """The rows of a page are forgotten when its first life begins, and not when it is given out again."""
    renew, seen = manager.rows._renew, set()

    def first(pages: Any) -> None:
        renew(np.array([page for page in pages.tolist() if page not in seen], np.int64))
        seen.update(pages.tolist())

    manager.rows._renew = first


@planted("-", "rows_follow_kv")
def forgets_lost_passes(manager: Any) -> None:
    """A pass that never comes to an end begins no lives."""
    end = manager.rows.end

    def ended(over: Any) -> None:
        manager.rows._flight = deque([over])
        end(over)

    manager.rows.end = ended


@planted("vllm#42571", "given_once", "none_free_and_held", "content_survives", "no_block_lost", "no_unexpected_error")
def locks_nothing(manager: Any) -> None:
    """The prefix that a request has from the tree may be evicted while the request runs."""
    manager.tree.lock = lambda *_, **__: None


@planted("LMCache#1034", "no_block_lost", "all_come_back")
def frees_whole_pages_only(manager: Any) -> None:
    """The page that a request has begun, and not filled, is forgotten when the request ends."""
    free = manager.allocator.free_segment
    size = manager.block_tokens
    manager.allocator.free_segment = lambda slots, start_pos: free(
        slots[: len(slots) // size * size], start_pos=start_pos
    )


@planted("vllm#57727", "reset_forgets", "none_free_and_held", "no_block_lost")
def flushes_no_tree(manager: Any) -> None:
    """A flush empties the pools, and leaves the tree as it is."""
    manager.tree.reset = lambda: None
