"""Who holds which block. A reference count is what this table says, never a number kept beside it.

Pure: no I/O, no clock, no lock.
"""

from __future__ import annotations

from collections.abc import Iterable


class Leases:
    """Owner-named claims on blocks; an owner holds a block once, a block may have several owners.

    >>> leases = Leases()
    >>> leases.acquire("req-1", [4, 5]); leases.acquire("req-2", [4])
    >>> leases.count(4), leases.release("req-1"), leases.release("req-1")
    (2, [5], [])
    """

    __slots__ = ("_blocks", "_owners")

    def __init__(self) -> None:
        self._blocks: dict[str, dict[int, None]] = {}
        self._owners: dict[int, set[str]] = {}

    def acquire(self, owner: str, blocks: Iterable[int]) -> None:
        """Let ``owner`` hold ``blocks``; holding one already changes nothing."""
        for block in blocks:
            self._blocks.setdefault(owner, {})[block] = None
            holders = self._owners.get(block)
            if holders is None:
                self._owners[block] = {owner}
            else:
                holders.add(owner)

    def release(self, owner: str, blocks: Iterable[int] | None = None) -> list[int]:
        """End ``owner``'s claim on ``blocks`` (all it has, if None); the blocks that nobody holds any more.

        Blocks that the owner does not hold are passed over, so releasing twice is harmless.
        """
        held = self._blocks.get(owner)
        if held is None:
            return []
        unheld = []
        for block in list(held) if blocks is None else blocks:
            if block in held:
                del held[block]
                holders = self._owners[block]
                holders.discard(owner)
                if not holders:
                    del self._owners[block]
                    unheld.append(block)
        if not held:
            del self._blocks[owner]
        return unheld

    def pass_on(self, sources: list[int], to: Leases, targets: list[int], followers: list[frozenset[str]]) -> None:
        """Claims of ``followers`` on ``sources`` become claims on ``targets`` of ``to``, pair by pair.

        Nobody holds the targets before. A follower that has let its source go meanwhile is passed over.
        """
        mine, theirs = self._owners, to._owners
        now: list[object] = [mine.get(source) for source in sources]
        if now == followers and len(everybody := set().union(*followers)) == 1:  # as preemption does it, in bulk
            theirs.update(zip(targets, map(mine.pop, sources), strict=True))
            (holder,) = everybody
            held = self._blocks[holder]
            for source in sources:
                del held[source]
            if not held:
                del self._blocks[holder]
            to._blocks.setdefault(holder, {}).update(dict.fromkeys(targets))
            return
        for source, target, names in zip(sources, targets, followers, strict=True):
            current = mine.get(source)
            if not current:
                continue
            if current <= names:
                going = mine.pop(source)
            elif going := current & names:
                mine[source] = current - going
            else:
                continue
            theirs[target] = going
            for holder in going:
                held = self._blocks[holder]
                del held[source]
                if not held:
                    del self._blocks[holder]
                to._blocks.setdefault(holder, {})[target] = None

    def split(self, blocks: list[int]) -> tuple[list[int], list[int]]:
        """Which of ``blocks`` somebody holds, and which nobody does."""
        owners = self._owners
        if owners.keys().isdisjoint(blocks):
            return [], blocks
        held = [b for b in blocks if b in owners]
        return held, [] if len(held) == len(blocks) else [b for b in blocks if b not in owners]

    def count(self, block: int) -> int:
        """The block's reference count."""
        holders = self._owners.get(block)
        return len(holders) if holders else 0

    def holds(self, owner: str, block: int) -> bool:
        return block in self._blocks.get(owner, ())

    def snapshot(self, blocks: list[int]) -> list[frozenset[str]]:
        """The owners of each of ``blocks``, as they are now."""
        nobody: frozenset[str] = frozenset()
        return [frozenset(owners) if owners else nobody for owners in map(self._owners.get, blocks)]

    def blocks(self, owner: str) -> list[int]:
        """The owner's blocks in the order in which it took them."""
        return list(self._blocks.get(owner, ()))

    def all_owners(self) -> frozenset[str]:
        return frozenset(self._blocks)

    def held(self) -> int:
        """How many blocks somebody holds."""
        return len(self._owners)
