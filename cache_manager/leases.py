"""Who holds which block: an array of blocks for each owner.

A block's reference count, ``holders``, is a cache of these arrays: it always equals how often the block stands in them.

Pure: no I/O, no clock, no lock.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence

import numpy as np
from numpy import count_nonzero as count
from numpy.typing import NDArray

Ints = NDArray[np.int64]
_NONE: Ints = np.empty(0, np.int64)


Followers = list[tuple[Hashable, NDArray[np.bool_]]]
"""Owners whose claims follow a move, each with a mask over the move's pairs."""


class Leases:
    """Owner-named claims on ``blocks`` blocks; an owner holds a block once, a block may have several owners.

    >>> leases = Leases(8)
    >>> leases.acquire("req-1", np.array([4, 5])); leases.acquire("req-2", np.array([4]))
    >>> leases.holders[4], leases.release("req-1").tolist(), leases.release("req-1").tolist()
    (np.int32(2), [5], [])
    """

    __slots__ = ("_blocks", "_mark", "_staying", "holders")

    def __init__(self, blocks: int) -> None:
        self._blocks: dict[Hashable, array[int]] = {}
        self._staying: set[Hashable] = set()
        self.holders: NDArray[np.int32] = np.zeros(blocks, np.int32)
        self._mark: NDArray[np.bool_] = np.zeros(blocks, np.bool_)  # all False between calls

    def among(self, ids: Ints, others: Ints) -> NDArray[np.bool_]:
        """Which of ``ids`` are in ``others``: a tenth of what ``np.isin`` costs, less where they are the same."""
        if ids.size == others.size and count(ids == others) == ids.size:
            return np.ones(ids.size, np.bool_)
        self._mark[others] = True
        found = self._mark.take(ids)
        self._mark[others] = False
        return found

    def acquire(self, owner: Hashable, ids: Ints, *, stays: bool = False) -> None:
        """Let ``owner`` hold ``ids``, each given once; holding one already changes nothing.

        The claims of an owner that ``stays`` follow no move: a job's, whose store works on these very blocks.
        """
        if stays:
            self._staying.add(owner)
        mine = self._blocks.get(owner)
        if mine is None:
            if not ids.size:
                return
            mine = self._blocks[owner] = array("q")
        elif mine:
            ids = ids[~self.among(ids, np.array(mine))]
        mine.frombytes(ids.tobytes())
        self.holders[ids] = self.holders.take(ids) + 1

    def acquire_each(self, owners: Iterable[Hashable], ids: Ints) -> None:
        """Let each of ``owners`` hold the one of ``ids`` at its place, which nobody holds."""
        for owner, block in zip(owners, ids.tolist(), strict=True):
            mine = self._blocks.get(owner)
            if mine is None:
                mine = self._blocks[owner] = array("q")
            mine.append(block)
        self.holders[ids] = 1

    def release(self, owner: Hashable, ids: Ints | None = None, *, held: bool = False) -> Ints:
        """End ``owner``'s claim on ``ids`` (all it has, if None); the blocks that nobody holds any more.

        Blocks that the owner does not hold are passed over, so releasing twice is harmless; ``held`` says that it holds
        all of them, each given once.
        """
        mine = self._blocks.get(owner)
        if mine is None:
            return _NONE
        if ids is None or (held and ids.size == len(mine)):
            del self._blocks[owner]
            self._staying.discard(owner)
            left = np.array(mine)
        else:
            left = self._remove(owner, mine, ids)
        self.holders[left] = now = self.holders.take(left) - 1
        unheld: Ints = left[now == 0]
        return unheld

    def _remove(self, owner: Hashable, mine: array[int], ids: Ints) -> Ints:
        """Take ``ids`` out of the owner's array; those that were in it."""
        held = np.array(mine)
        going = self.among(held, ids)
        left = held[going]
        if left.size == held.size:
            del self._blocks[owner]
        else:
            del mine[:]
            mine.frombytes(held[~going].tobytes())
        return left

    def followers(self, sources: Ints, owner: Hashable | None) -> Followers:
        """``owner``, or all owners of some of ``sources`` that do not stay, and which of these each has now."""
        if owner is not None:
            return [(owner, self.among(sources, self.blocks(owner)))]
        owners = [(name, mine) for name, mine in self._blocks.items() if name not in self._staying]
        masks = [(name, self.among(sources, np.array(mine))) for name, mine in owners]
        return [(name, mask) for name, mask in masks if count(mask)]

    def pass_on(self, sources: Ints, to: Leases, targets: Ints, followers: Followers) -> None:
        """Claims of ``followers`` on ``sources`` become claims on ``targets`` of ``to``, pair by pair.

        Nobody holds the targets before. A follower that has let its source go meanwhile is passed over.
        """
        for owner, mask in followers:
            going = mask & self.among(sources, self.blocks(owner))
            everything = count(going) == going.size
            self.release(owner, sources if everything else sources[going], held=True)
            to.acquire(owner, targets if everything else targets[going])

    def holds(self, owner: Hashable, block: int) -> bool:
        return block in self._blocks.get(owner, ())

    def blocks(self, owner: Hashable) -> Ints:
        """The owner's blocks in the order in which it took them; the caller's own."""
        mine = self._blocks.get(owner)
        return _NONE if mine is None else np.array(mine)

    def counted(self) -> NDArray[np.int64]:
        """Reference counts as the arrays say: what :attr:`holders` must equal."""
        held: Sequence[Ints] = [np.array(mine) for mine in self._blocks.values()]
        return np.bincount(np.concatenate(held) if held else _NONE, minlength=self.holders.size)
