"""Block managers with faults that trackers of engines have reported, each by a mechanism that ``tiny_faults`` lacks.

The reports are listed on the page of proofs. ``breaks`` and ``also`` are as in ``tiny_faults``.
"""

from __future__ import annotations

import zlib
from contextlib import suppress
from itertools import takewhile

from tiny_managers import Sharing, Storing

from cache_manager.testing.life import MoveFailed


class CopiesOutTooLate(Sharing):
    """The copy to the host is made when the next sequence is admitted: its source belongs to another sequence by
    then."""

    breaks = "content_survives"
    late: tuple[tuple[int, int], ...] = ()

    def swap_out(self, pairs):
        self.late = (*self.late, *pairs)

    def admit(self, seq, tokens, chunk, salt):
        self.kv.swap_out(self.late)
        self.late = ()
        return super().admit(seq, tokens, chunk, salt)


class TakesAFailedCopyForDone(Sharing):
    breaks = "content_survives"

    def swap_in(self, pairs):
        with suppress(MoveFailed):
            super().swap_in(pairs)


class LeaksOnAFailedCopy(Sharing):
    """The host blocks that were reserved for a copy are not given back when it fails."""

    breaks = "refusal_changes_nothing"

    def swap_out(self, pairs):
        try:
            super().swap_out(pairs)
        except MoveFailed:
            del self.host_list[: len(pairs)]
            raise


class CountsNoFork(Sharing):
    """A fork does not count, and the count that would be negative is set to zero."""

    breaks = "ref_count_is_holders"

    def fork(self, parent, child):
        counts = dict(self.counts)
        done = super().fork(parent, child)
        self.counts = counts
        return done

    def let_go(self, table):
        super().let_go([block for block in table if self.counts[block]])


class Remembers(Sharing):
    """Sound; with a note of tables of before."""

    def __init__(self, kv) -> None:
        super().__init__(kv)
        self.past: dict[str, list[int]] = {}


class LetsGoTwice(Remembers):
    """The table of a sequence that has ended is kept, and let go of again by the next who frees it."""

    breaks = "ref_count_is_holders"
    also = ("no_block_lost",)

    def free(self, seq):
        self.let_go(self.past.pop(seq, []))
        if seq in self.tables and seq not in self.swapped:
            self.past[seq] = list(self.tables[seq])
        super().free(seq)


class FreesHostBlocksTwice(Remembers):
    """The end of a sequence that was on the host once frees its host blocks again."""

    breaks = "host_conserved"

    def resume(self, seq):
        host = self.tables[seq]
        fits = super().resume(seq)
        if fits:
            self.past[seq] = host
        return fits

    def free(self, seq):
        super().free(seq)
        self.host_list += self.past.pop(seq, [])


class FreesADuplicateInUse(Sharing):
    """A block that has a twin by now is freed, and stays in the table that it is in."""

    breaks = "no_block_lost"
    also = ("none_free_and_held",)

    def commit(self, seq, tokens):
        super().commit(seq, tokens)
        for block in self.tables[seq]:
            twins = [twin for twin, key in self.keys.items() if key == self.keys.get(block)]
            if len(twins) > 1 and self.counts[block] == 1:
                del self.keys[block]
                self.let_go([block])


class CountsSharedBlocksTwice(Sharing):
    """What could be handed out is counted when a holder lets go: a shared block once for each of them."""

    breaks = "no_block_lost"
    shared = 0

    def let_go(self, table):
        self.shared += sum(self.counts[block] > 1 for block in table)
        super().let_go(table)

    def free_blocks(self):
        return len(self.free_list) + self.shared


class LeaksWhatIsNotComputed(Sharing):
    """The end of a sequence frees the blocks that are full and computed, and forgets the others but the first."""

    breaks = "no_block_lost"

    def free(self, seq):
        if seq in self.tables and seq not in self.swapped:
            self.tables[seq] = self.tables[seq][: max(1, self.done[seq] // self.block_tokens)]
        super().free(seq)


class RaisesForWhoHasEnded(Sharing):
    breaks = "no_unexpected_error"

    def free(self, seq):
        self.table(seq)
        super().free(seq)


class PublishesWhatIsAdmitted(Sharing):
    """The blocks of a prompt may be found from their allocation on."""

    breaks = "hit_was_written"
    also = ("hit_is_its_prefix",)
    blocks = range(64)

    def admit(self, seq, tokens, chunk, salt):
        cached = super().admit(seq, tokens, chunk, salt)
        if cached is not None:
            self.commit(seq, tokens)
            self.done[seq] = cached
        return cached


class PublishesAcrossAReset(Sharing):
    """A sequence that was there before the weights changed publishes under the new ones."""

    breaks = "reset_forgets"
    capabilities = ("prefix", "reset")

    def reset(self):
        super().reset()
        self.salts = {seq: (salt, self.version) for seq, (salt, _) in self.salts.items()}
        return True


class TrustsAShortHash(Sharing):
    breaks = "hit_is_its_prefix"
    also = ("salts_apart", "reset_forgets")

    def key(self, salt, tokens):
        return zlib.crc32(repr((salt, tuple(tokens))).encode()) % 31


class KeepsAStaleKey(Sharing):
    """A block that is handed out again is still found under its old key."""

    breaks = "hit_is_its_prefix"
    also = ("hit_was_written", "salts_apart")

    def take(self, n):
        keys = dict(self.keys)
        taken = super().take(n)
        self.keys = keys
        return taken


class LosesATwin(Sharing):
    """Two sequences compute one prefix; when the first one's block is handed out again, the second's is not found."""

    breaks = "held_is_found"
    capabilities = ("prefix",)
    lost: frozenset[tuple] = frozenset()  # keys

    def take(self, n):
        self.lost |= {self.keys.get(block) for block in self.free_list[:n]}
        return super().take(n)

    def commit(self, seq, tokens):
        known = set(self.keys)
        super().commit(seq, tokens)
        self.lost -= {key for block, key in self.keys.items() if block not in known}

    def match(self, tokens, salt):
        return list(takewhile(lambda block: self.keys[block] not in self.lost, super().match(tokens, salt)))


class StoresTheNextBlockInstead(Storing):
    """A store that fails is tried again, with the block that comes next and the key of the one that failed."""

    breaks = "hit_is_its_prefix"
    also = ("hit_was_written",)

    def persist(self, seq):
        full = self.full(seq)
        for at, (key, block) in enumerate(full):
            try:
                self.kv.put(key, block)
            except MoveFailed:
                self.kv.put(key, [*self.tables[seq], block][at + 1])


class ResetLeavesTheStore(Storing):
    """The store's keys do not tell the weights apart."""

    breaks = "reset_forgets"

    def stored_key(self, scope, tokens):
        return self.key((scope[0], 0), tokens)


REPORTED = tuple(
    made
    for made in list(globals().values())
    if isinstance(made, type) and made.__module__ == __name__ and made is not Remembers
)
