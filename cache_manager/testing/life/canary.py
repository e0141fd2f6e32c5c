"""The oracle: KV that says what it was computed from.

The KV of a token is a function of the salt, the tokens up to it, its position and the weights that each of them was
computed with. A :class:`Content` is one value of that function: a node of a trie, so that no two can collide. The kit
writes contents at the slots that a manager names, and follows the copies that it asks for; the manager never sees one.
So a stale, shifted, foreign or leaked block is recognised by its content, whatever the manager believes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace

Pairs = Iterable[Sequence[int]]
"""(source, target) block ids; a numpy array ``[n, 2]`` will do."""


class MoveFailed(RuntimeError):  # noqa: N818 - reads as an event
    """Raised by the kit in the middle of a copy, on purpose. The targets' content then means nothing."""


@dataclass(eq=False, slots=True)
class Content:
    """The arguments of the function that gives one position's KV; equal contents are one object."""

    parent: Content | None
    salt: str
    token: int
    version: int
    position: int
    _after: dict[tuple[int, int], Content] = field(default_factory=dict)

    def then(self, token: int, version: int) -> Content:
        """The content of the next position, computed with the weights ``version``."""
        key = token, version
        found = self._after.get(key)
        if found is None:
            found = self._after[key] = Content(self, self.salt, token, version, self.position + 1)
        return found

    @property
    def path(self) -> list[Content]:
        """The contents of the positions up to this one."""
        found: list[Content] = []
        at: Content | None = self
        while at is not None and at.parent is not None:
            found.append(at)
            at = at.parent
        return found[::-1]

    @property
    def tokens(self) -> list[int]:
        return [content.token for content in self.path]

    def __str__(self) -> str:
        salt = f" under salt {self.salt!r}" if self.salt else ""
        versions = sorted({content.version for content in self.path})
        weights = "" if versions == [0] else f", weights {' and '.join(map(str, versions))}"
        return f"KV at position {self.position} of {self.tokens}{salt}{weights}"


def beginning(salt: str) -> Content:
    """What comes before position 0."""
    return Content(None, salt, -1, -1, -1)


@dataclass(frozen=True, slots=True)
class Cell:
    """The entry of one slot: a content, and the pass that computed it. ``serial`` > 0 differs for every token computed,
    and is the value of its row; ``row`` says whether there must be one."""

    content: Content
    writer: str
    line: int  # of the story
    serial: int
    row: bool

    @property
    def written(self) -> str:
        return f"written in line {self.line} by {self.writer}"


Block = list[Cell | None]
_COPIES = {"copy": "blocks copied", "swap_out": "blocks swapped out", "swap_in": "blocks swapped in"}


class CanaryKV:
    """The engine's memory, as the kit keeps it. An adapter passes on the copies that its manager asks for.

    With the capability ``failing_moves`` any of its calls may raise :class:`MoveFailed`.
    """

    def __init__(self, block_tokens: int) -> None:
        self._empty: Block = [None] * block_tokens
        self.device: dict[int, Block] = {}
        self.host: dict[int, Block] = {}
        self.stored: dict[Hashable, Block] = {}
        self.watch: Callable[[str, list[tuple[int, int]]], None] | None = None
        self.counts: Counter[str] = Counter()
        self.rows_return = True  # from the store, beside their KV
        self.fail_next = False
        self.failed = False

    def cell(self, tier: dict[int, Block], block: int, offset: int) -> Cell | None:
        return tier.get(block, self._empty)[offset]

    def write(self, block: int, offset: int, cell: Cell) -> None:
        """The write of a forward pass."""
        self.device.setdefault(block, list(self._empty))[offset] = cell

    # ---------------------------------------------------------------- what an adapter calls

    def copy(self, pairs: Pairs) -> None:
        """Device blocks to device blocks, before a write to a shared one."""
        self._move("copy", pairs, self.device, self.device)

    def swap_out(self, pairs: Pairs) -> None:
        """Device blocks to host blocks."""
        self._move("swap_out", pairs, self.device, self.host)

    def swap_in(self, pairs: Pairs) -> None:
        """Host blocks to device blocks."""
        self._move("swap_in", pairs, self.host, self.device)

    def put(self, key: Hashable, block: int) -> None:
        """A device block to the store. A block stored under the key stays."""
        self.may_fail()
        self.counts["blocks stored"] += 1
        self.stored.setdefault(key, list(self.device.get(block, self._empty)))

    def get(self, key: Hashable, block: int) -> bool:
        """Load the stored block of ``key`` into a device block; ``False`` if there is none."""
        self._maybe_fail([block], self.device)
        if key not in self.stored:
            return False
        self.counts["store"] += 1
        cells = self.stored[key]
        self.device[block] = [cell if cell is None or self.rows_return else replace(cell, row=False) for cell in cells]
        return True

    def may_fail(self) -> None:
        """For other parts of an adapter that can fail, such as a second store: raises when the kit wants a failure."""
        self._maybe_fail([], self.device)

    def _move(self, kind: str, pairs: Pairs, source: dict[int, Block], target: dict[int, Block]) -> None:
        moved = [(int(first), int(second)) for first, second in pairs]
        self._maybe_fail([second for _, second in moved], target)
        if self.watch is not None:
            self.watch(kind, moved)
        self.counts[_COPIES[kind]] += len(moved)
        contents = [list(source.get(first, self._empty)) for first, _ in moved]
        for (_, second), content in zip(moved, contents, strict=True):
            target[second] = content

    def _maybe_fail(self, targets: Sequence[int], tier: dict[int, Block]) -> None:
        if self.fail_next:
            self.fail_next = False
            self.failed = True
            self.counts["failing_moves"] += 1
            for block in targets:
                tier.pop(block, None)
            raise MoveFailed("the copy failed on purpose")

    def forget(self) -> None:
        """The process ended: everything but the store is lost."""
        self.device.clear()
        self.host.clear()
