"""Block managers of a page for the tests of the life-cycle kit: sound ones, and one for each fault."""

from __future__ import annotations

from itertools import takewhile

from cache_manager.testing.life import BlockManagerAdapter


class Plain(BlockManagerAdapter):
    """A list of free blocks and a table for each sequence; nothing is shared."""

    also: tuple[str, ...] = ()  # what a fault breaks besides, in one operation

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


class Leaky(Plain):
    """Forgets the last block of a sequence that it frees."""

    breaks = "no_block_lost"

    def free(self, seq):
        self.free_list += self.tables.pop(seq, [])[:-1]


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
        self.kv.swap_out(zip(table, targets, strict=True))
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
        self.kv.swap_in(zip(table, targets, strict=True))
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


class ForgetsReset(Sharing):
    breaks = "reset_forgets"

    def reset(self):
        return True


class IgnoresSalt(Sharing):
    breaks = "salts_apart"

    def key(self, salt, tokens):
        return salt[1], tuple(tokens)


class KeyOfOneBlock(Sharing):
    breaks = "hit_is_its_prefix"

    def key(self, salt, tokens):
        return salt, tuple(tokens[-self.block_tokens :])


class PublishesBeforeItIsComputed(Sharing):
    breaks = "hit_was_written"
    also = ("hit_is_its_prefix",)

    def grow(self, seq, tokens, upto):
        fits = super().grow(seq, tokens, upto)
        if fits:
            done = self.done[seq]
            self.commit(seq, tokens[:upto])
            self.done[seq] = done
        return fits


class LeavesNothingToCompute(Sharing):
    breaks = "hit_leaves_one"

    def match(self, tokens, salt):
        return super().match([*tokens, 0], salt)


class WritesShared(Sharing):
    breaks = "shared_not_written"

    def grow(self, seq, tokens, upto):
        more = max(0, -(-upto // self.block_tokens) - len(self.tables[seq]))
        if more > len(self.free_list):
            return False
        self.tables[seq] += self.take(more)
        return True


class HitStaysFree(Sharing):
    breaks = "none_free_and_held"
    also = ("ids_are_blocks",)

    def hold(self, block):
        self.counts[block] += 1

    def free_blocks(self):
        return len(self.blocks) - sum(n > 0 for n in self.counts.values())


class SwapsToOtherBlocks(Sharing):
    breaks = "content_survives"

    def preempt(self, seq):
        fits = super().preempt(seq)
        if fits:
            self.tables[seq].reverse()
        return fits


class HoldsWhatItRefuses(Sharing):
    breaks = "refusal_changes_nothing"

    def admit(self, seq, tokens, chunk, salt):
        cached = super().admit(seq, tokens, chunk, salt)
        if cached is None:
            for block in self.match(tokens, (salt, self.version)):
                self.hold(block)
        return cached


class ResumesIntoHeld(Sharing):
    breaks = "copies_are_sound"

    def resume(self, seq):
        held = [block for block, n in self.counts.items() if n]
        self.free_list[:0] = held[:1]
        return super().resume(seq)


class SwallowsWhatIsFound(ResumesIntoHeld):
    """The same fault, in a manager that catches every error and carries on."""

    def resume(self, seq):
        try:
            return super().resume(seq)
        except Exception:  # noqa: BLE001 - that is the fault
            return False


class FreesTwice(Sharing):
    breaks = "free_is_final"

    def free(self, seq):
        if seq not in self.tables and self.salts:
            self.free_list.append(0)
        super().free(seq)


class LosesHostBlocks(Sharing):
    breaks = "host_conserved"

    def free(self, seq):
        if seq in self.swapped:
            self.tables[seq] = self.tables[seq][:-1]
        super().free(seq)


class CountsWrongly(Sharing):
    breaks = "ref_count_is_holders"

    def ref_counts(self):
        return {block: min(n, 1) for block, n in self.counts.items()}


class RefusesForNothing(Sharing):
    breaks = "refusal_is_honest"

    def admit(self, seq, tokens, chunk, salt):
        return None if len(self.free_list) == len(tokens) else super().admit(seq, tokens, chunk, salt)


class HandsOutUnknownBlocks(Sharing):
    breaks = "ids_are_blocks"

    def table(self, seq):
        table = self.tables[seq]
        return [*table[:1], *table[:1], *table[2:]] if len(table) > 2 else table


class ForgetsToGrow(Sharing):
    breaks = "table_covers"

    def grow(self, seq, tokens, upto):
        return len(self.tables[seq]) * self.block_tokens < upto or super().grow(seq, tokens, upto)


class FindsOnlyWhatIsFree(Sharing):
    breaks = "held_is_found"

    def match(self, tokens, salt):
        return list(takewhile(lambda block: self.counts[block] == 0, super().match(tokens, salt)))


class Raises(Sharing):
    breaks = "no_unexpected_error"

    def free(self, seq):
        assert seq not in self.swapped
        super().free(seq)


class ShufflesOthers(Sharing):
    breaks = "others_untouched"

    def free(self, seq):
        super().free(seq)
        for table in self.tables.values():
            table.append(table[-1])


class ChecksItself(Sharing):
    breaks = "own_check"

    def check(self):
        assert len(self.free_list) > 5


class RollsDice(Sharing):
    breaks = "determinism"
    made = 0

    def __init__(self, kv) -> None:
        super().__init__(kv)
        RollsDice.made += 1
        self.free_list = self.free_list[RollsDice.made % 8 :] + self.free_list[: RollsDice.made % 8]


class Lies(Plain):
    """Loses a block with each sequence, and counts it as free."""

    breaks = "all_come_back"

    def free(self, seq):
        self.free_list += self.tables.pop(seq, [])[:-1]

    def free_blocks(self):
        return len(self.blocks) - sum(map(len, self.tables.values()))


class GivesTwice(HitStaysFree):
    """The same fault, of a manager that shows nobody its free blocks."""

    breaks = "given_once"
    also = ("ids_are_blocks",)

    def free_ids(self):
        return None


class NeverEnds(Plain):
    """Keeps a block for work in the background that never ends."""

    capabilities = ("background",)
    breaks = "background_ends"

    def __init__(self, kv) -> None:
        super().__init__(kv)
        self.free_list.pop()

    def settle(self):
        return {}

    def kept_blocks(self):
        return [7]


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


class ReadsOtherRows(KeepsRows):
    breaks = "rows_follow_kv"

    def read_rows(self, seq, start, stop):
        return [row and row + 1 for row in super().read_rows(seq, start, stop)]


class LosesRows(KeepsRows):
    breaks = "rows_are_kept"

    def write_rows(self, seq, start, rows):
        super().write_rows(seq, start, rows if start == 0 else [None] * len(rows))


FAULTS = (
    Leaky,
    Lies,
    GivesTwice,
    NeverEnds,
    ReadsOtherRows,
    LosesRows,
    ForgetsReset,
    IgnoresSalt,
    KeyOfOneBlock,
    PublishesBeforeItIsComputed,
    LeavesNothingToCompute,
    WritesShared,
    HitStaysFree,
    SwapsToOtherBlocks,
    HoldsWhatItRefuses,
    ResumesIntoHeld,
    SwallowsWhatIsFound,
    FreesTwice,
    LosesHostBlocks,
    CountsWrongly,
    RefusesForNothing,
    HandsOutUnknownBlocks,
    ForgetsToGrow,
    FindsOnlyWhatIsFree,
    Raises,
    ShufflesOthers,
    ChecksItself,
    RollsDice,
)
