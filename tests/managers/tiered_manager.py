"""A block manager with what engines have besides: forks with copy-on-write, swaps to host blocks, a store.

:class:`TieredManager` is sound; ``planted_managers.py`` breaks it in many ways. It grows out of the example manager,
asks for copies through :class:`Copies`, and gives each operation up whole where a copy fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from nano import Nano, NanoManager

from cache_manager.testing.life import MoveFailed

Pairs = list[tuple[int, int]]


class Copies(Protocol):
    """The device, as the manager sees it: copies of whole blocks, in order, each done when its call returns."""

    def copy(self, pairs: Pairs) -> None: ...
    def swap_out(self, pairs: Pairs) -> None: ...
    def swap_in(self, pairs: Pairs) -> None: ...
    def put(self, key: int, block: int) -> None: ...
    def get(self, key: int, block: int) -> bool: ...
    def has(self, key: int) -> bool: ...


class TieredManager(NanoManager):
    """``host`` blocks beside those of the device. A method that raises what a copy raised has changed nothing."""

    def __init__(self, blocks: int, size: int, host: int, copies: Copies) -> None:
        super().__init__(blocks, size)
        self.copies = copies
        self.host_unused: deque[int] = deque(range(host))
        self.swapped: set[str] = set()
        self.computed: dict[str, list[int]] = {}  # the tokens whose KV is there

    # ---------------------------------------------------------------- what an engine calls

    def allocate(self, name: str, tokens: Sequence[int], upto: int, salt: str = "") -> int | None:
        """As in the base; and what the store has after the cached prefix is fetched into new blocks, and published."""
        root = self.root(salt)
        found = self.find(tokens, root)
        stored = self.find_stored(tokens, root, len(found))
        known = (len(found) + len(stored)) * self.size
        need = self.blocks_for(min(len(tokens), known + upto)) - len(found)
        if need > self.available() - sum(self.blocks[number].holders == 0 for number in found):
            return None
        for number in found:
            self.hold(number)
        table = found + [self.take() for _ in range(need)]
        try:
            for key, number in zip(stored, table[len(found) :], strict=False):
                self.copies.get(key, number)
        except MoveFailed:
            for number in reversed(table):
                self.let_go(number)
            raise
        self.tables[name], self.roots[name] = table, root
        self.publish(name, tokens[:known])
        return known

    def append(self, name: str, upto: int) -> bool:
        """As in the base; and the block that is written next is copied first where another sequence reads it too."""
        table, written = self.tables[name], len(self.computed[name]) // self.size
        shared = [at for at in range(written, len(table)) if self.blocks[table[at]].holders > 1]
        if len(shared) + max(0, self.blocks_for(upto) - len(table)) > self.available():
            return False
        own = [self.take() for _ in shared]
        try:
            if shared:
                self.copies.copy([(table[at], number) for at, number in zip(shared, own, strict=True)])
        except MoveFailed:
            self.give_back(own)
            raise
        for at, number in zip(shared, own, strict=True):
            self.let_go(table[at])
            table[at] = number
        return super().append(name, upto)

    def publish(self, name: str, tokens: Sequence[int]) -> None:
        self.computed[name] = list(tokens)
        super().publish(name, tokens)

    def release(self, name: str) -> None:
        self.computed.pop(name, None)
        if name in self.swapped:
            self.swapped.remove(name)
            self.free_host(self.tables.pop(name))
        super().release(name)

    def fork(self, parent: str, child: str) -> None:
        """``child`` reads what ``parent`` has computed, the partial last block included. It needs no block for that."""
        table = self.tables[parent][: self.blocks_for(len(self.computed[parent]))]
        for number in table:
            self.hold(number)
        self.tables[child], self.roots[child] = list(table), self.roots[parent]
        self.computed[child] = list(self.computed[parent])

    def preempt(self, name: str) -> bool:
        """To host blocks; whether there was room."""
        table = self.tables[name]
        if len(table) > len(self.host_unused):
            return False
        host = [self.host_unused.popleft() for _ in table]
        try:
            self.copies.swap_out(list(zip(table, host, strict=True)))
        except MoveFailed:
            self.host_unused.extendleft(reversed(host))
            raise
        for number in reversed(table):
            self.let_go(number)
        self.tables[name] = host
        self.swapped.add(name)
        return True

    def resume(self, name: str) -> bool:
        """Back to device blocks; whether there was room."""
        host = self.tables[name]
        if len(host) > self.available():
            return False
        table = [self.take() for _ in host]
        try:
            self.copies.swap_in(list(zip(host, table, strict=True)))
        except MoveFailed:
            self.give_back(table)
            raise
        self.free_host(host)
        self.tables[name] = table
        self.swapped.remove(name)
        self.publish(name, self.computed[name])
        return True

    def persist(self, name: str) -> None:
        """The full blocks of ``name``, to the store."""
        for number, (key, _) in zip(self.tables[name], self.keys(self.computed[name], self.roots[name]), strict=False):
            self.copies.put(key, number)

    # ---------------------------------------------------------------- the parts

    def find_stored(self, tokens: Sequence[int], root: int, found: int) -> list[int]:
        """The keys of the blocks that the store has, from the ``found``-th on without a gap."""
        keys = [key for key, _ in self.keys(tokens[:-1], root)][found:]
        for at, key in enumerate(keys):
            if not self.copies.has(key):
                return keys[:at]
        return keys

    def give_back(self, taken: list[int]) -> None:
        """Blocks that were taken for nothing."""
        for number in reversed(taken):
            self.blocks[number].holders = 0
            self.unheld.appendleft(number)

    def free_host(self, host: list[int]) -> None:
        self.host_unused.extend(host)


class Tiered(Nano):
    """Eight blocks of two tokens, and five on the host; :class:`Stored` has the store, which is seldom of use here."""

    capabilities = ("prefix", "salt", "fork", "swap", "reset", "abort", "lost_step", "drafts", "failing_moves")
    host_blocks = range(5)
    manager_type: type[TieredManager] = TieredManager
    manager: TieredManager

    def new_manager(self) -> TieredManager:
        return self.manager_type(len(self.blocks), self.block_tokens, len(self.host_blocks), self.kv)

    def fork(self, parent: str, child: str) -> bool:
        self.manager.fork(parent, child)
        return True

    def preempt(self, seq: str) -> bool:
        return self.manager.preempt(seq)

    def resume(self, seq: str) -> bool:
        return self.manager.resume(seq)

    def free_host_blocks(self) -> int:
        return len(self.manager.host_unused)

    def persist(self, seq: str) -> None:
        self.manager.persist(seq)


class Stored(Tiered):
    """Eight blocks of one token, so that much is asked for again, and a store."""

    capabilities = ("prefix", "store", "reset", "restart", "failing_moves")
    block_tokens = 1

    def restart(self) -> None:
        generation = self.manager.generation  # of the weights, which the new process has too
        self.manager = self.new_manager()
        self.manager.generation = generation


class OnlyPrefixes(Tiered):
    """Six blocks, and an engine that shares prefixes and nothing more."""

    capabilities = ("prefix",)
    blocks = range(6)


class OnlyResets(Tiered):
    """Eight blocks, and an engine whose weights change."""

    capabilities = ("prefix", "reset")
