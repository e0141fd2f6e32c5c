"""A batch that may have a key more than once, cut into rounds that have each key once. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from cache_manager.keys import BlockKey


def rounds(keys: Iterable[BlockKey]) -> list[list[int]]:
    """Positions; those of a key's first occurrences come first, then those of its second ones, and so on.

    >>> rounds([b"a", b"b", b"a", b"a"])
    [[0, 1], [2], [3]]
    """
    found: list[list[int]] = []
    seen: dict[BlockKey, int] = {}
    for i, key in enumerate(keys):
        turn = seen[key] = seen.get(key, -1) + 1
        if turn == len(found):
            found.append([])
        found[turn].append(i)
    return found


__all__ = ["rounds"]
