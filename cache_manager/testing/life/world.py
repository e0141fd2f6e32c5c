"""One example: a manager, the kit's memory of what must be where, and the story so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from inspect import signature
from operator import index
from typing import Any, Final, TypeAlias

from cache_manager.errors import InvalidInputError
from cache_manager.testing.life.adapter import CAPABILITIES, METHODS, BlockManagerAdapter
from cache_manager.testing.life.canary import CanaryKV, Content, MoveFailed, beginning
from cache_manager.testing.life.invariants import INVARIANTS, InvariantBroken, Operation

Table: TypeAlias = list[int | None]


def blocks(table: Table | None) -> str:
    """A table as it is told: ``[b4 b1]``, with a dot for a block that the window has left."""
    if table is None:
        return "-"
    return "[" + " ".join("." if block is None else f"b{block}" for block in table) + "]"


@dataclass(eq=False, slots=True)
class Sequence:
    """A sequence as the kit knows it. ``contents`` are what its computed positions must hold."""

    name: str
    tokens: list[int]
    salt: str
    contents: list[Content] = field(default_factory=list)
    swapped: bool = False
    waiting: bool = False

    @property
    def computed(self) -> int:
        return len(self.contents)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the manager says between two operations."""

    tables: dict[str, Table]
    free: int
    host_free: int | None
    refs: dict[int, int] | None


class World:
    """The manager of one example and what surrounds it: calls, snapshots, holders, failures.

    ``counts`` collects what was exercised, over examples. ``before`` and ``after`` are the manager's own words around
    the operation that runs.
    """

    def __init__(self, adapter: type[BlockManagerAdapter], counts: Counter[str]) -> None:
        self.adapter, self.counts = adapter, counts
        check_adapter(adapter)
        self.capabilities = frozenset(adapter.capabilities)
        self.size, self.capacity = adapter.block_tokens, len(adapter.blocks)
        self.live: dict[str, Sequence] = {}
        self.past: list[list[int]] = []  # tokens of sequences that were there: their prefixes are asked for again
        self.version = self.serial = 0
        self.program: list[Operation] = []
        self.story: list[str] = []
        self.failure: InvariantBroken | None = None
        self._beginnings: dict[str, Content] = {}
        self.kv = CanaryKV(self.size)
        self.kv.counts, self.kv.rows_return = counts, adapter.hits_need_rows
        self.before = self.after = Snapshot({}, 0, None, None)
        try:
            self.manager = adapter(self.kv)
        except Exception as error:
            raise InvalidInputError(
                f"{adapter.__name__}(kv)", "a manager with all its blocks free", repr(error)
            ) from error
        self.before = self.after = self.look()
        counts["examples"] += 1

    def can(self, capability: str) -> bool:
        return capability in self.capabilities

    def beginning(self, salt: str) -> Content:
        return self._beginnings.setdefault(salt, beginning(salt))

    # ---------------------------------------------------------------- telling

    def begin(self, text: str) -> None:
        """A new line of the story."""
        self.counts["operations"] += 1
        self.story.append(text)
        self.before = self.after

    def tell(self, text: str) -> None:
        self.story[-1] += text

    def fail(self, name: str, what: str) -> None:
        """The invariant does not hold: raises :class:`InvariantBroken`, unless the adapter does not claim it."""
        if name in self.adapter.unclaimed:
            self.counts[f"unclaimed {name}"] += 1
            return
        self.failure = InvariantBroken(name, what, list(self.program))
        raise self.failure

    # ---------------------------------------------------------------- asking the manager

    def ask(self, method: str, *arguments: Any) -> Any:
        """The manager's answer, of the kind that :data:`ANSWERS` says; an exception is a finding, unless it is what
        became of ``MoveFailed``.

        What the kit finds in the middle of a call, in its copies, is raised also where the manager has caught it.
        Raises :class:`InvalidInputError` for an answer of another kind, which is the adapter's mistake.
        """
        answer: Any = None
        try:
            answer = getattr(self.manager, method)(*arguments)
        except Exception as error:
            if self.failure is None:
                answer = MoveFailed()
                if not _on_purpose(error):
                    self.fail("no_unexpected_error", f"{method}{_shown(arguments)} raised {error!r}")
                    raise
        if self.failure is not None:
            raise self.failure
        return answer if isinstance(answer, MoveFailed) else self._read(method, answer, *arguments)

    def _read(self, method: str, answer: Any, *arguments: Any) -> Any:
        if method not in ANSWERS:
            return answer
        wanted, read = ANSWERS[method]
        try:
            return read(answer, *arguments)
        except (TypeError, ValueError, AttributeError):
            where = f", after: {self.story[-1]}" if self.story else ""
            raise InvalidInputError(f"{self.adapter.__name__}.{method}()", wanted, f"{answer!r}{where}") from None

    def call(self, method: str, *arguments: Any, fail: bool = False) -> Any:
        """Like :meth:`ask`, of a call that changes something; ``fail``: its first copy of blocks fails."""
        self.kv.fail_next, self.kv.failed = fail and self.can("failing_moves"), False
        answer = self.ask(method, *arguments)
        self.kv.fail_next = False
        return answer

    def look(self) -> Snapshot:
        return Snapshot(
            {name: self.ask("table", name) for name in self.live},
            self.ask("free_blocks"),
            self.ask("free_host_blocks") if self.can("swap") else None,
            self.ask("ref_counts"),
        )

    def holders(self, seen: Snapshot, tier: str = "device") -> dict[int, list[str]]:
        """Who holds each block of a tier."""
        found: dict[int, list[str]] = {}
        for name, table in seen.tables.items():
            sequence = self.live.get(name)
            if sequence is not None and sequence.swapped == (tier == "host"):
                for block in table:
                    if block is not None:
                        found.setdefault(block, []).append(name)
        return found

    @property
    def busy(self) -> bool:
        """Whether something is done in the background."""
        return any(sequence.waiting for sequence in self.live.values())


def _number(answer: Any, *_: Any) -> int:
    if isinstance(answer, bool):
        raise TypeError
    return index(answer)


def _room(answer: Any, *_: Any) -> int | None:
    return None if answer is None else _number(answer)


def _done(answer: Any, *_: Any) -> bool:
    if type(answer).__name__ not in ("bool", "bool_"):
        raise TypeError
    return bool(answer)


def _grown(answer: Any, tokens: Mapping[str, Any]) -> list[bool]:
    return [_done(done) for done, _ in zip(answer, tokens, strict=True)]


def _blocks(answer: Any, *_: Any) -> Table:
    return [_room(block) for block in answer]


def _slots(answer: Any, _seq: str, start: int, stop: int) -> list[tuple[int, int]]:
    return [(index(block), index(offset)) for (block, offset), _ in zip(answer, range(start, stop), strict=True)]


def _counts(answer: Any, *_: Any) -> dict[Any, int]:
    return {key: _number(n) for key, n in answer.items()}


_IDS: Final = "a list of block ids"
_DONE: Final = "True, or False where nothing was done", _done
ANSWERS: Final[Mapping[str, tuple[str, Callable[..., Any]]]] = {
    "admit": ("a number of tokens, or None", _room),
    **dict.fromkeys(("grow", "fork", "preempt", "resume", "reset", "waits"), _DONE),
    **dict.fromkeys(("free_blocks", "free_host_blocks"), ("a number of blocks", _number)),
    "table": (f"{_IDS}, None for one that the window has left", _blocks),
    "slots": ("a pair (block, offset) for each position", _slots),
    "grow_batch": ("True or False for each sequence", _grown),
    "read_rows": ("a list of rows, None for one that is missing", _blocks),
    "settle": ("a number of tokens by the name of each sequence that waits no longer", _counts),
    "free_ids": (f"{_IDS}, or None", lambda answer: None if answer is None else [index(block) for block in answer]),
    "ref_counts": (
        "a count by block id, or None",
        lambda answer: None if answer is None else {index(b): n for b, n in _counts(answer).items() if n},
    ),
}
"""What the methods answer, in words, and how the answer is read: what cannot be is a ``TypeError`` or its like."""


def check_adapter(adapter: type[BlockManagerAdapter]) -> None:
    """:class:`InvalidInputError` for an adapter that lacks a method, or names what does not exist."""
    if not (isinstance(adapter, type) and issubclass(adapter, BlockManagerAdapter)):
        raise InvalidInputError("adapter", "a subclass of BlockManagerAdapter", repr(adapter))
    _known("capabilities", adapter.capabilities, CAPABILITIES)
    _known("unclaimed", adapter.unclaimed, INVARIANTS)
    for name in ("blocks", "host_blocks"):
        if not isinstance(found := getattr(adapter, name), Collection):
            raise InvalidInputError(f"{adapter.__name__}.{name}", "a collection of block ids", repr(found))
    if not isinstance(adapter.block_tokens, int) or adapter.block_tokens < 1 or len(adapter.blocks) < 2:
        got = f"{len(adapter.blocks)} blocks of {adapter.block_tokens!r}"
        raise InvalidInputError("blocks", "two blocks of one token or more", got)
    needed = [name for what in ("", *adapter.capabilities) for name in METHODS.get(what, ())]
    if lacking := [f"{name}()" for name in needed if getattr(adapter, name) is getattr(BlockManagerAdapter, name)]:
        raise InvalidInputError(adapter.__name__, f"a method of its own: {', '.join(lacking)}", "none")
    for name in needed:
        wanted, found = (signature(getattr(kind, name)) for kind in (BlockManagerAdapter, adapter))
        try:
            found.bind(*wanted.parameters)
        except TypeError:
            names = (", ".join(each.parameters) for each in (wanted, found))
            raise InvalidInputError(
                f"{adapter.__name__}.{name}()", *(f"the parameters {each}" for each in names)
            ) from None


def _known(what: str, given: Collection[str], known: Collection[str]) -> None:
    if isinstance(given, str):
        raise InvalidInputError(what, "a tuple of names", repr(given))
    if unknown := sorted(set(given) - set(known)):
        raise InvalidInputError(what, f"some of {', '.join(known)}", ", ".join(unknown))


def _on_purpose(error: BaseException) -> bool:
    """Whether ``error`` is what became of :class:`MoveFailed`."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        if isinstance(at, MoveFailed):
            return True
        seen.add(id(at))
        at = at.__cause__ or at.__context__
    return False


def _shown(arguments: tuple[Any, ...]) -> str:
    return f"({', '.join(map(repr, arguments))})"
