"""Sound block managers of a page for the tests of the life-cycle kit; those with faults are in ``tiny_faults``
and ``tiny_reported``."""

from __future__ import annotations

from cache_manager.testing.life import BlockManagerAdapter, MoveFailed


class Plain(BlockManagerAdapter):
    """A list of free blocks and a table for each sequence; nothing is shared."""

    also: tuple[str, ...] = ()  # by what a fault shows itself besides

    capabilities = ("abort", "lost_step")

    def __init__(self, kv) -> None:
        super().__init__(kv)
        self.free_list = list(self.blocks)
        self.tables: dict[str, list[int]] = {}

    def admit(self, seq, tokens, chunk, salt):
        self.tables[seq] = []
        if self.grow(seq, tokens, len(tokens)):
            return 0
        del self.tables[seq]
        return None

    def grow(self, seq, tokens, upto):
        more = -(-upto // self.block_tokens) - len(self.tables[seq])
        if more > len(self.free_list):
            return False
        self.tables[seq] += [self.free_list.pop(0) for _ in range(more)]
        return True

    def commit(self, seq, tokens): ...

    def free(self, seq):
        self.free_list += self.tables.pop(seq, [])

    def table(self, seq):
        return self.tables[seq]

    def free_blocks(self):
        return len(self.free_list)

    def free_ids(self):
        return self.free_list


class Sharing(BlockManagerAdapter):
    """Counts, keys, forks with copies, swaps, weights: the well-known small design."""

    also: tuple[str, ...] = ()
    capabilities = ("prefix", "salt", "fork", "swap", "reset", "abort", "lost_step", "drafts", "failing_moves")
    host_blocks = range(4)

    def __init__(self, kv) -> None:
        super().__init__(kv)
        self.free_list, self.host_list = list(self.blocks), list(self.host_blocks)
        self.counts = dict.fromkeys(self.blocks, 0)
        self.keys: dict[int, tuple] = {}  # of blocks that are found
        self.tables: dict[str, list[int]] = {}
        self.salts: dict[str, tuple] = {}
        self.done: dict[str, int] = {}
        self.tokens: dict[str, list[int]] = {}  # that are computed
        self.swapped: set[str] = set()
        self.version = 0

    # ------------------------------------------------ blocks

    def key(self, salt, tokens):
        return salt, tuple(tokens)

    def match(self, tokens, salt):
        found, size = [], self.block_tokens
        where = {key: block for block, key in self.keys.items()}
        for stop in range(size, len(tokens), size):
            block = where.get(self.key(salt, tokens[:stop]))
            if block is None:
                break
            found.append(block)
        return found

    def take(self, n):
        taken = [self.free_list.pop(0) for _ in range(n)]
        for block in taken:
            self.counts[block] = 1
            self.keys.pop(block, None)
        return taken

    def hold(self, block):
        if self.counts[block] == 0:
            self.free_list.remove(block)
        self.counts[block] += 1

    def let_go(self, table):
        for block in reversed(table):
            self.counts[block] -= 1
            if self.counts[block] == 0:
                self.free_list.append(block)

    def swap_out(self, pairs):
        self.kv.swap_out(pairs)

    def swap_in(self, pairs):
        self.kv.swap_in(pairs)

    # ------------------------------------------------ the adapter

    def admit(self, seq, tokens, chunk, salt):
        scope = (salt, self.version)
        shared = self.match(tokens, scope)
        fresh = -(-len(tokens) // self.block_tokens) - len(shared)
        if fresh > len(self.free_list) - sum(self.counts[block] == 0 for block in shared):
            return None
        for block in shared:
            self.hold(block)
        self.tables[seq] = shared + self.take(fresh)
        self.salts[seq], self.done[seq] = scope, len(shared) * self.block_tokens
        return self.done[seq]

    def grow(self, seq, tokens, upto):
        table, first = self.tables[seq], self.done[seq] // self.block_tokens
        shared = [at for at in range(first, len(table)) if self.counts[table[at]] > 1]
        more = max(0, -(-upto // self.block_tokens) - len(table))
        if len(shared) + more > len(self.free_list):
            return False
        copies = self.free_list[: len(shared)]
        if copies:
            self.kv.copy([(table[at], copy) for at, copy in zip(shared, copies, strict=True)])
        for at, copy in zip(shared, self.take(len(shared)), strict=True):
            self.let_go([table[at]])
            table[at] = copy
        table += self.take(more)
        return True

    def commit(self, seq, tokens):
        self.done[seq], self.tokens[seq], size = len(tokens), tokens, self.block_tokens
        if self.salts[seq][1] == self.version:
            for at in range(len(tokens) // size):
                self.keys[self.tables[seq][at]] = self.key(self.salts[seq], tokens[: (at + 1) * size])

    def free(self, seq):
        table = self.tables.pop(seq, [])
        if seq in self.swapped:
            self.swapped.discard(seq)
            self.host_list += table
        else:
            self.let_go(table)

    def fork(self, parent, child):
        table = self.tables[parent][: -(-self.done[parent] // self.block_tokens)]
        for block in table:
            self.hold(block)
        self.tables[child], self.salts[child] = list(table), self.salts[parent]
        self.done[child], self.tokens[child] = self.done[parent], self.tokens[parent]
        return True

    def preempt(self, seq):
        table = self.tables[seq]
        if len(table) > len(self.host_list):
            return False
        targets = self.host_list[: len(table)]
        self.swap_out(list(zip(table, targets, strict=True)))
        del self.host_list[: len(table)]
        self.let_go(table)
        self.tables[seq] = targets
        self.swapped.add(seq)
        return True

    def resume(self, seq):
        table = self.tables[seq]
        if len(table) > len(self.free_list):
            return False
        targets = self.free_list[: len(table)]
        for block in targets:
            self.keys.pop(block, None)
        self.swap_in(list(zip(table, targets, strict=True)))
        self.tables[seq] = self.take(len(table))
        self.host_list += table
        self.swapped.discard(seq)
        self.commit(seq, self.tokens[seq])
        return True

    def reset(self):
        self.version += 1
        self.keys.clear()
        return True

    def table(self, seq):
        return self.tables[seq]

    def free_blocks(self):
        return len(self.free_list)

    def free_host_blocks(self):
        return len(self.host_list)

    def free_ids(self):
        return self.free_list

    def ref_counts(self):
        return self.counts


class Storing(Sharing):
    """Blocks of one token, so that much is asked for again, and a store that outlives the process."""

    capabilities = ("prefix", "store", "reset", "restart", "failing_moves")
    block_tokens = 1

    def stored_key(self, scope, tokens):
        return self.key(scope, tokens)

    def admit(self, seq, tokens, chunk, salt):
        cached = super().admit(seq, tokens, chunk, salt)
        if cached is None:
            return None
        try:
            while cached + self.block_tokens < len(tokens):
                stop = cached + self.block_tokens
                block = self.tables[seq][cached // self.block_tokens]
                if not self.kv.get(self.stored_key(self.salts[seq], tokens[:stop]), block):
                    break
                cached = stop
        except MoveFailed:
            self.free(seq)
            raise
        self.commit(seq, tokens[:cached])
        return cached

    def full(self, seq):
        """The full blocks of ``seq`` that are computed, each with its key in the store."""
        tokens, size = self.tokens[seq], self.block_tokens
        keys = [self.stored_key(self.salts[seq], tokens[:stop]) for stop in range(size, len(tokens) + 1, size)]
        return list(zip(keys, self.tables[seq], strict=False))

    def persist(self, seq):
        for key, block in self.full(seq):
            self.kv.put(key, block)

    def restart(self):
        version = self.version  # of the weights, which the new process has too
        self.__init__(self.kv)
        self.version = version


class KeepsRows(Plain):
    """Rows by block and offset, as a device has them."""

    capabilities = ("rows",)

    def __init__(self, kv) -> None:
        super().__init__(kv)
        self.rows: dict[tuple[int, int], int] = {}
        self.computed: dict[str, int] = {}

    def write_rows(self, seq, start, rows):
        for at, row in zip(self.slots(seq, start, start + len(rows)), rows, strict=True):
            self.rows.pop(at, None)
            if row is not None:
                self.rows[at] = row

    def commit(self, seq, tokens):
        self.computed[seq] = len(tokens)

    def read_rows(self, seq, start, stop):
        done = self.computed[seq]
        slots = self.slots(seq, start, stop)
        return [self.rows.get(at) if n < done else None for n, at in enumerate(slots, start)]
