"""One example: a manager, the kit's record of the right contents, and the story so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from inspect import signature
from operator import index
from typing import Any, Final, TypeAlias

from cache_manager.errors import InvalidInputError
from cache_manager.testing.life.adapter import CAPABILITIES, METHODS, BlockManagerAdapter
from cache_manager.testing.life.canary import CanaryKV, Cell, Content, MoveFailed, beginning
from cache_manager.testing.life.invariants import INVARIANTS, InvariantBroken, Operation

Table: TypeAlias = list[int | None]


def blocks(table: Table | None) -> str:
    """A table as text: ``[b4 b1]``, with a dot for a block that the window has left."""
    if table is None:
        return "-"
    return "[" + " ".join("." if block is None else f"b{block}" for block in table) + "]"


@dataclass(eq=False, slots=True)
class Sequence:
    """A sequence as the kit knows it. ``contents`` are the right contents of its computed positions."""

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
    """The manager's answers between two operations."""

    tables: dict[str, Table]
    free: int
    host_free: int | None
    refs: dict[int, int] | None


class World:
    """The manager of one example and what surrounds it: calls, snapshots, holders, failures.

    ``counts`` collects what was exercised, over examples. ``before`` and ``after`` are the manager's answers around the
    current operation.
    """

    def __init__(self, adapter: type[BlockManagerAdapter], counts: Counter[str]) -> None:
        check_adapter(adapter)
        self.adapter = adapter
        self.counts = counts
        self.size = adapter.block_tokens
        self.capacity = len(adapter.blocks)
        self.live: dict[str, Sequence] = {}
        self.past: list[list[int]] = []  # tokens of ended sequences: their prefixes are asked for again
        self.version = self.serial = 0
        self.program: list[Operation] = []
        self.story: list[str] = []
        self.failure: InvariantBroken | None = None
        self._beginnings: dict[str, Content] = {}
        self.kv = CanaryKV(self.size)
        self.kv.counts = counts
        self.kv.rows_return = adapter.hits_need_rows
        self.before = self.after = Snapshot({}, 0, None, None)
        try:
            self.manager = adapter(self.kv)
        except Exception as error:
            where = f"{adapter.__name__}(kv)"
            raise InvalidInputError(where, "a manager with all its blocks free", repr(error)) from error
        self.before = self.after = self.look()
        counts["examples"] += 1

    def can(self, capability: str) -> bool:
        return capability in self.adapter.capabilities

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

    def told(self, error: InvariantBroken) -> InvariantBroken:
        """The error, which has just happened, with the story: operations, tables before and after, and blocks."""
        lines = [f"{error.name}: {INVARIANTS[error.name]}", f"  {error.what}", ""]
        lines.append(f"{self.adapter.__name__}, {self.capacity} blocks of {self.size} tokens:")
        lines += [f"  {number}. {line}" for number, line in enumerate(self.story, 1)]
        lines += ["", f"  {'tables':<8}{'before line ' + str(len(self.story)):<30}after"]
        for seq in sorted(self.before.tables.keys() | self.after.tables.keys()):
            was = self.before.tables.get(seq)
            now = self.after.tables.get(seq)
            lines.append(f"  {seq:<8}{blocks(was):<30}{blocks(now)}")
        lines += [f"  {'free':<8}{self.before.free:<30}{self.after.free}", ""]
        for host, tier, ids in (
            ("", self.kv.device, self.adapter.blocks),
            ("host ", self.kv.host, self.adapter.host_blocks),
        ):
            holders = self.holders(self.after, "host" if host else "device")
            for block in ids:
                cells = [(at, cell) for at, cell in enumerate(tier.get(block, [])) if cell is not None]
                if not cells and block not in holders:
                    continue
                count = "" if host or self.after.refs is None else f", count {self.after.refs.get(block, 0)}"
                lines.append(f"  {host}b{block}, held by {' and '.join(holders.get(block, ['nobody']))}{count}")
                lines += [f"    [{at}] {cell.content}; {cell.written}" for at, cell in cells]
        return InvariantBroken(error.name, error.what, error.program, "\n".join(lines).rstrip())

    # ---------------------------------------------------------------- asking the manager

    def ask(self, method: str, *arguments: Any) -> Any:
        """The manager's answer, of the kind that the port says; an exception is a finding, unless ``MoveFailed`` caused
        it: then the answer is ``None``.

        A finding of the kit in the middle of a call, in its copies, is raised even if the manager has caught it. Raises
        :class:`InvalidInputError` for an answer of another kind, which is the adapter's mistake.
        """
        try:
            answer = getattr(self.manager, method)(*arguments)
        except Exception as error:
            if self.failure is None:
                if self.kv.failed and _on_purpose(error):
                    return None
                self.fail("no_unexpected_error", f"{method}({', '.join(map(repr, arguments))}) raised {error!r}")
                raise
        if self.failure is not None:
            raise self.failure
        wanted = getattr(BlockManagerAdapter, method).__annotations__["return"]
        try:
            return ANSWERS[wanted](answer, *arguments) if wanted != "None" else answer
        except (TypeError, ValueError, AttributeError):
            where = f", after: {self.story[-1]}" if self.story else ""
            raise InvalidInputError(f"{self.adapter.__name__}.{method}()", wanted, f"{answer!r}{where}") from None

    def call(self, method: str, *arguments: Any, fail: bool = False) -> Any:
        """Like :meth:`ask`, for a call that changes something; ``fail``: its first copy of blocks fails."""
        self.kv.fail_next = fail and self.can("failing_moves")
        self.kv.failed = False
        try:
            return self.ask(method, *arguments)
        finally:
            self.kv.fail_next = False
            if self.kv.failed:
                self.tell(" -> a copy failed")

    def look(self) -> Snapshot:
        return Snapshot(
            {name: self.ask("table", name) for name in self.live},
            self.ask("free_blocks"),
            self.ask("free_host_blocks") if self.can("swap") else None,
            self.ask("ref_counts"),
        )

    def holders(self, seen: Snapshot, tier: str = "device") -> dict[int, list[str]]:
        """The sequences that hold each block of a tier."""
        found: dict[int, list[str]] = {}
        for name, table in seen.tables.items():
            sequence = self.live.get(name)
            if sequence is not None and sequence.swapped == (tier == "host"):
                for block in table:
                    if block is not None:
                        found.setdefault(block, []).append(name)
        return found

    def at(self, sequence: Sequence, position: int) -> tuple[int | None, Cell | None]:
        """The block that the table names for a position, and the content of its slot."""
        table = self.after.tables[sequence.name]
        entry, offset = divmod(position, self.size)
        block = table[entry] if entry < len(table) else None
        tier = self.kv.host if sequence.swapped else self.kv.device
        return block, None if block is None else self.kv.cell(tier, block, offset)


# -------------------------------------------------------------------- answers


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


ANSWERS: Final[Mapping[str, Callable[..., Any]]] = {
    "int": _number,
    "int | None": _room,
    "bool": _done,
    "Sequence[bool]": lambda answer, asked: [_done(done) for done, _ in zip(answer, asked, strict=True)],
    "Sequence[int | None]": lambda answer, *_: [_room(block) for block in answer],
    "Sequence[int] | None": lambda answer: None if answer is None else [index(block) for block in answer],
    "Sequence[tuple[int, int]]": lambda answer, _, start, stop: [
        (index(block), index(offset)) for (block, offset), _ in zip(answer, range(start, stop), strict=True)
    ],
    "Mapping[str, int]": lambda answer: {name: _number(n) for name, n in answer.items()},
    "Mapping[int, int] | None": lambda answer: (
        None if answer is None else {index(block): n for block, n in answer.items() if _number(n)}
    ),
}
"""How an answer is read, by the method's annotation: a wrong one raises ``TypeError`` or the like."""


def check_adapter(adapter: type[BlockManagerAdapter]) -> None:
    """:class:`InvalidInputError` for an adapter that lacks a method, or names an unknown capability or invariant."""
    if not (isinstance(adapter, type) and issubclass(adapter, BlockManagerAdapter)):
        raise InvalidInputError("adapter", "a subclass of BlockManagerAdapter", repr(adapter))
    for what, known in (("capabilities", CAPABILITIES), ("unclaimed", INVARIANTS)):
        if isinstance(given := getattr(adapter, what), str):
            raise InvalidInputError(what, "a tuple of names", repr(given))
        if unknown := sorted(set(given) - set(known)):
            raise InvalidInputError(what, f"some of {', '.join(known)}", ", ".join(unknown))
    for what in ("blocks", "host_blocks"):
        if not isinstance(found := getattr(adapter, what), Collection):
            raise InvalidInputError(f"{adapter.__name__}.{what}", "a collection of block ids", repr(found))
    if not isinstance(adapter.block_tokens, int) or adapter.block_tokens < 1 or len(adapter.blocks) < 2:
        got = f"{len(adapter.blocks)} blocks of {adapter.block_tokens!r}"
        raise InvalidInputError("blocks", "two blocks of one token or more", got)
    needed = [name for what in ("", *adapter.capabilities) for name in METHODS.get(what, ())]
    if lacking := [f"{name}()" for name in needed if getattr(adapter, name) is getattr(BlockManagerAdapter, name)]:
        raise InvalidInputError(adapter.__name__, f"a method of its own: {', '.join(lacking)}", "none")
    for name in needed:
        wanted, own = (signature(getattr(kind, name)).parameters for kind in (BlockManagerAdapter, adapter))
        try:
            signature(getattr(adapter, name)).bind(*wanted)
        except TypeError:
            told = (f"the parameters {', '.join(each)}" for each in (wanted, own))
            raise InvalidInputError(f"{adapter.__name__}.{name}()", *told) from None


def _on_purpose(error: BaseException | None) -> bool:
    """Whether :class:`MoveFailed` caused ``error``."""
    seen: list[BaseException] = []
    while error is not None and error not in seen and not isinstance(error, MoveFailed):
        seen.append(error)
        error = error.__cause__ or error.__context__
    return isinstance(error, MoveFailed)
