"""A block manager of nano-vllm's design, and its adapter for the life-cycle kit.

The design is a list of blocks with a count of holders each, a deque of blocks without holders, and a table from the
chained hash of a block's tokens to the block. A block without holders keeps its content, and can be found, until the
deque hands it out again. The code was written for this repository, and differs from nano-vllm in one point: a block can
be found only after :meth:`NanoManager.publish`, which the engine calls when the KV is there, and not from its
allocation on.

    cd examples/managers && kvroute prove nano:Nano
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from cache_manager.testing.life import BlockManagerAdapter, CanaryKV

Key = tuple[int, tuple[int, ...]]


class Block:
    """A block of ``size`` tokens. ``key`` and ``tokens`` are set when it is full and computed, and can be found."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.holders = 0
        self.key: int | None = None
        self.tokens: tuple[int, ...] = ()


class NanoManager:
    """``blocks`` blocks of ``size`` tokens; a sequence is identified by its name.

    A method that returns "no room" has changed nothing. Only unknown names raise.
    """

    def __init__(self, blocks: int, size: int) -> None:
        self.size = size
        self.blocks = [Block(number) for number in range(blocks)]
        self.unheld: deque[int] = deque(range(blocks))  # handed out from the left, the longest unheld first
        self.by_key: dict[int, int] = {}
        self.tables: dict[str, list[int]] = {}
        self.roots: dict[str, int] = {}  # what comes before a sequence's first block: its salt, and the weights
        self.generation = 0

    # ---------------------------------------------------------------- what an engine calls

    def allocate(self, name: str, tokens: Sequence[int], upto: int, salt: str = "") -> int | None:
        """Take blocks for the cached prefix of ``tokens`` and ``upto`` more; how many were cached, or ``None``."""
        root = self.root(salt)
        found = self.find(tokens, root)
        cached = len(found) * self.size
        need = self.blocks_for(min(len(tokens), cached + upto)) - len(found)
        if need > self.available() - sum(self.blocks[number].holders == 0 for number in found):
            return None
        for number in found:
            self.hold(number)
        self.tables[name] = found + [self.take() for _ in range(need)]
        self.roots[name] = root
        return cached

    def append(self, name: str, upto: int) -> bool:
        """Take blocks for the first ``upto`` tokens; returns whether there was room."""
        need = self.blocks_for(upto) - len(self.tables[name])
        if need > self.available():
            return False
        self.tables[name] += [self.take() for _ in range(need)]
        return True

    def publish(self, name: str, tokens: Sequence[int]) -> None:
        """The KV of ``tokens`` is computed: full blocks may be found from now on."""
        table = self.tables[name]
        for number, (key, part) in zip(table, self.keys(tokens, self.roots[name]), strict=False):
            block = self.blocks[number]
            if block.key is None:
                block.key, block.tokens = key, part
                self.by_key.setdefault(key, number)

    def release(self, name: str) -> None:
        """The sequence ends. Its last blocks are handed out first: a prefix is worth more than what follows it."""
        for number in reversed(self.tables.pop(name, [])):
            self.let_go(number)
        self.roots.pop(name, None)

    def reset(self) -> None:
        """New weights. Later sequences do not find blocks that earlier sequences still publish."""
        self.generation += 1

    # ---------------------------------------------------------------- parts

    def available(self) -> int:
        """How many blocks could be handed out now."""
        return len(self.unheld)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def root(self, salt: str) -> int:
        return hash((salt, self.generation))

    def keys(self, tokens: Sequence[int], root: int) -> Iterator[Key]:
        """The key and the tokens of each full block; a key also covers the tokens before its block."""
        key = root
        for start in range(0, len(tokens) - self.size + 1, self.size):
            part = tuple(tokens[start : start + self.size])
            key = hash((key, part))
            yield key, part

    def find(self, tokens: Sequence[int], root: int) -> list[int]:
        """The blocks of the longest cached prefix that leaves a token to compute."""
        found = []
        for key, part in self.keys(tokens[:-1], root):
            number = self.by_key.get(key)
            if number is None or not self.same(self.blocks[number], part):
                break
            found.append(number)
        return found

    def same(self, block: Block, part: tuple[int, ...]) -> bool:
        return block.tokens == part

    def take(self) -> int:
        """The block that was unheld the longest; it is no longer found under its key."""
        block = self.blocks[self.unheld.popleft()]
        self.forget(block)
        block.holders = 1
        return block.number

    def hold(self, number: int) -> None:
        block = self.blocks[number]
        if block.holders == 0:
            self.unheld.remove(number)
        block.holders += 1

    def let_go(self, number: int) -> None:
        block = self.blocks[number]
        block.holders -= 1
        if block.holders == 0:
            self.unheld.append(number)

    def forget(self, block: Block) -> None:
        """``block`` is no longer found. Another block with the same key takes its place."""
        if block.key is not None and self.by_key.get(block.key) == block.number:
            del self.by_key[block.key]
            for twin in self.blocks:
                if twin is not block and twin.key == block.key:
                    self.by_key[block.key] = twin.number
                    break
        block.key, block.tokens = None, ()


class Nano(BlockManagerAdapter):
    """Eight blocks of two tokens."""

    capabilities = ("prefix", "salt", "reset", "abort", "lost_step")

    def __init__(self, kv: CanaryKV) -> None:
        super().__init__(kv)
        self.manager = NanoManager(len(self.blocks), self.block_tokens)

    def admit(self, seq: str, tokens: Sequence[int], chunk: int, salt: str) -> int | None:
        return self.manager.allocate(seq, tokens, chunk, salt)

    def grow(self, seq: str, tokens: Sequence[int], upto: int) -> bool:  # noqa: ARG002 - the port's signature
        return self.manager.append(seq, upto)

    def commit(self, seq: str, tokens: Sequence[int]) -> None:
        self.manager.publish(seq, tokens)

    def free(self, seq: str) -> None:
        self.manager.release(seq)

    def reset(self) -> bool:
        self.manager.reset()
        return True

    def table(self, seq: str) -> list[int]:
        return self.manager.tables[seq]

    def free_blocks(self) -> int:
        return self.manager.available()

    def ref_counts(self) -> dict[int, int]:
        return {block.number: block.holders for block in self.manager.blocks}

    def free_ids(self) -> list[int]:
        return list(self.manager.unheld)
