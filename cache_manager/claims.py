"""What is under way over the blocks of a table: steps, and copies. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from cache_manager.slots import Bits, Flags, Ints

NO_INTS: Final[Ints] = np.empty(0, np.int64)


@dataclass(slots=True, eq=False)
class Claim:
    """What a step in flight will write: rows at ``slots [n]``: ``bits [m]`` of ``mask_words [m]``, each once.

    A device writes at ``reach``, which includes slots that were dropped from the step. Their blocks are in ``blocks``
    too, with -1 for a generation.
    """

    step: Any
    slots: Ints
    mask_words: Ints
    bits: Bits
    in_place: bool
    reach: Ints
    blocks: Ints  # each once
    generations: Ints  # of ``blocks``, at the beginning
    mine: Flags | None = None  # which slots are still the step's; None: all
    origin_ends: int = 0  # as many as had ended at the beginning: some of the blocks' may be among later ones

    @property
    def held(self) -> Ints:
        """The slots that are still the step's."""
        return self.slots if self.mine is None else self.slots[self.mine]


@dataclass(slots=True, eq=False)
class Fence:
    """A copy into blocks ``ids [n]`` that runs without the lock, until it is ``over``."""

    ids: Ints = field(default_factory=lambda: NO_INTS)
    drops: Ints = field(default_factory=lambda: NO_INTS)  # of the blocks, at the beginning
    over: bool = False
