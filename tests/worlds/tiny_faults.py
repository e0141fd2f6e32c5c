"""Block managers with one fault each; with those of ``tiny_reported`` there is one for every claim of the kit.

Each says which claim it ``breaks``, and by which others the same fault shows itself ``also``, in another order.
"""

from __future__ import annotations

from tiny_managers import KeepsRows, Plain, Sharing


class Leaky(Plain):
    """Forgets the last block of a sequence that it frees."""

    breaks = "no_block_lost"

    def free(self, seq):
        self.free_list += self.tables.pop(seq, [])[:-1]


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
    capabilities = ("prefix",)

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
    also = ("refusal_changes_nothing",)

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


class Lies(Plain):
    """Loses a block with each sequence, and counts it as free."""

    breaks = "all_come_back"
    also = ("refusal_is_honest",)

    def free(self, seq):
        self.free_list += self.tables.pop(seq, [])[:-1]

    def free_blocks(self):
        return len(self.blocks) - sum(map(len, self.tables.values()))


class GivesTwice(HitStaysFree):
    """The same fault, in a manager that does not show its free blocks."""

    breaks = "given_once"
    also = ("ids_are_blocks",)

    def free_ids(self):
        return None


class EndsWhatNobodyWaitsFor(Plain):
    capabilities = ("background",)
    breaks = "background_ends"

    def waits(self, seq):
        return True

    def settle(self):
        return {"nobody": 0}


class ReadsOtherRows(KeepsRows):
    breaks = "rows_follow_kv"

    def read_rows(self, seq, start, stop):
        return [row and row + 1 for row in super().read_rows(seq, start, stop)]


class LosesRows(KeepsRows):
    breaks = "rows_are_kept"

    def write_rows(self, seq, start, rows):
        super().write_rows(seq, start, rows if start == 0 else [None] * len(rows))


FAULTS = tuple(made for made in list(globals().values()) if isinstance(made, type) and made.__module__ == __name__)
