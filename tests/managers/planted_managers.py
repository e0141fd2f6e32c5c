"""Block managers with one fault each, of the kinds that trackers of engines have reported.

Each is a sound manager with one method done wrong. ``reports`` names threads with a fault of the same kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nano import Block, NanoManager
from tiered_manager import OnlyPrefixes, OnlyResets, Stored, Tiered, TieredManager

from cache_manager.testing.life import BlockManagerAdapter, MoveFailed


@dataclass(frozen=True, slots=True)
class Planted:
    """``claims`` are the invariants that may find the fault; which one does depends on the order of the operations."""

    adapter: type[BlockManagerAdapter]
    reports: str
    claims: frozenset[str]

    @property
    def name(self) -> str:
        return self.adapter.__name__


PLANTED: list[Planted] = []


def planted(
    reports: str, *claims: str, under: type[Tiered] = Tiered
) -> Callable[[type[TieredManager]], type[TieredManager]]:
    """``under`` is the adapter: a fault of one capability is found sooner where the engine has few others."""

    def register(manager: type[TieredManager]) -> type[TieredManager]:
        adapter = type(manager.__name__, (under,), {"manager_type": manager, "__doc__": manager.__doc__})
        PLANTED.append(Planted(adapter, reports, frozenset(claims)))
        return manager

    return register


# -------------------------------------------------------------------- copies that race


@planted("vllm#45704, vllm#46951", "content_survives")
class CopiesOutTooLate(TieredManager):
    """The copy to the host is queued, and made when the next sequence is admitted: its source is somebody else's."""

    queued: tuple[tuple[int, int], ...] = ()

    def preempt(self, name: str) -> bool:
        queue: list[tuple[int, int]] = []
        copies, self.copies = self.copies, _Queue(queue)
        try:
            return super().preempt(name)
        finally:
            self.copies, self.queued = copies, (*self.queued, *queue)


class _Queue:
    def __init__(self, queue: list[tuple[int, int]]) -> None:
        self.swap_out = queue.extend


@planted("vllm#47282", "copies_are_sound", "content_survives")
class CopiesIntoAHeldBlock(TieredManager):
    """A sequence is swapped into the blocks that it had, if nobody has them: one holder too many is nobody."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.had: dict[str, list[int]] = {}

    def preempt(self, name: str) -> bool:
        self.had[name] = list(self.tables[name])
        return super().preempt(name)

    def resume(self, name: str) -> bool:
        had, host = self.had[name], self.tables[name]
        if any(self.blocks[number].holders > 1 for number in had):
            return super().resume(name)
        self.copies.swap_in(list(zip(host, had, strict=True)))
        for number in had:
            self.forget(self.blocks[number])
            self.hold(number)
        self.free_host(host)
        self.tables[name] = had
        self.swapped.remove(name)
        self.publish(name, self.computed[name])
        return True


@planted("dynamo#15079", "content_survives", "hit_was_written", "hit_is_its_prefix")
class TakesAFailedCopyForDone(TieredManager):
    """A swap-in that failed is taken for one that was done."""

    def resume(self, name: str) -> bool:
        copies, self.copies = self.copies, _Forgiving(self.copies)
        try:
            return super().resume(name)
        finally:
            self.copies = copies


class _Forgiving:
    def __init__(self, copies: object) -> None:
        self.copies = copies

    def swap_in(self, pairs: list[tuple[int, int]]) -> None:
        try:
            self.copies.swap_in(pairs)  # type: ignore[attr-defined]
        except MoveFailed:
            return


@planted("vllm#53505", "content_survives", "hit_is_its_prefix")
class ComesBackInAnotherOrder(TieredManager):
    """The host blocks are remembered in the order of their numbers, and not in that of the tokens."""

    def preempt(self, name: str) -> bool:
        done = super().preempt(name)
        if done:
            self.tables[name].sort()
        return done


# -------------------------------------------------------------------- freed twice, counted wrong


@planted("LMCache#5005", "free_is_final", "none_free_and_held", "no_block_lost", "given_once", "ref_count_is_holders")
class FreesTwice(TieredManager):
    """The table of a sequence that has ended is kept, and freed again by the next who frees it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.ended: dict[str, list[int]] = {}

    def release(self, name: str) -> None:
        if name in self.ended:
            self.tables[name] = self.ended.pop(name)
        elif name not in self.swapped:
            self.ended[name] = list(self.tables[name])
        super().release(name)


@planted("LMCache#1365, LMCache#3381", "ref_count_is_holders", "none_free_and_held", "no_block_lost", "given_once")
class CountsNoFork(TieredManager):
    """A fork does not count, and the count that would be negative is set to zero."""

    def fork(self, parent: str, child: str) -> None:
        super().fork(parent, child)
        for number in self.tables[child]:
            self.blocks[number].holders -= 1

    def let_go(self, number: int) -> None:
        block = self.blocks[number]
        block.holders = max(0, block.holders - 1)
        if block.holders == 0 and number not in self.unheld:
            self.unheld.append(number)


@planted("mini-sglang PR142", "none_free_and_held", "no_block_lost", "ref_count_is_holders", "given_once")
class FreesADuplicateInUse(TieredManager):
    """A block that has a twin by now is freed, and stays in the table that it is in."""

    def publish(self, name: str, tokens: Sequence[int]) -> None:
        super().publish(name, tokens)
        for number in self.tables[name]:
            block = self.blocks[number]
            if block.key is not None and self.by_key[block.key] != number and block.holders == 1:
                self.forget(block)
                self.let_go(number)


@planted("sglang#13483", "host_conserved", "copies_are_sound", "content_survives")
class FreesHostBlocksTwice(TieredManager):
    """The end of a sequence that was on the host once frees its host blocks again."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.was: dict[str, list[int]] = {}

    def resume(self, name: str) -> bool:
        host = self.tables[name]
        done = super().resume(name)
        if done:
            self.was[name] = host
        return done

    def release(self, name: str) -> None:
        super().release(name)
        self.free_host(self.was.pop(name, []))


@planted("sglang#35270", "no_block_lost", "refusal_is_honest")
class CountsSharedBlocksTwice(TieredManager):
    """What could be handed out is counted when a holder lets go: a shared block is counted once for each of them."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.shared = 0

    def let_go(self, number: int) -> None:
        self.shared += self.blocks[number].holders > 1
        super().let_go(number)

    def available(self) -> int:
        return super().available() + self.shared


@planted("vllm#42571, kvcached PR398", "none_free_and_held", "no_block_lost", "given_once")
class GivesAHitAway(TieredManager):
    """A cached block that is hit stays among those that are handed out."""

    def hold(self, number: int) -> None:
        self.blocks[number].holders += 1


# -------------------------------------------------------------------- leaks


@planted("sglang#9927, sglang PR15439", "no_block_lost", "all_come_back", "ref_count_is_holders")
class LeaksWhatIsNotPublished(TieredManager):
    """The end of a sequence frees the blocks that were published: those of an abort's last step are nobody's."""

    def release(self, name: str) -> None:
        if name not in self.swapped:
            full = len(self.computed[name]) // self.size if name in self.computed else 0
            self.tables[name] = self.tables.get(name, [])[: max(full, 1)]
        super().release(name)


@planted("LMCache#1034, vllm#44100", "refusal_changes_nothing", "no_block_lost", "ref_count_is_holders")
class LeaksOnRefusal(TieredManager):
    """The cached prefix is held before it is known whether the rest fits, and is not let go of."""

    def allocate(self, name: str, tokens: Sequence[int], upto: int, salt: str = "") -> int | None:
        cached = super().allocate(name, tokens, upto, salt)
        if cached is None:
            for number in self.find(tokens, self.root(salt)):
                self.hold(number)
        return cached


@planted("LMCache#1285", "refusal_changes_nothing", "no_block_lost", "host_conserved")
class LeaksOnAFailedCopy(TieredManager):
    """The host blocks that were reserved for a copy are not given back when it fails."""

    def preempt(self, name: str) -> bool:
        before = list(self.host_unused)
        try:
            return super().preempt(name)
        except MoveFailed:
            for number in before[: len(self.tables[name])]:
                self.host_unused.remove(number)
            raise


@planted("vllm#25562", "no_unexpected_error")
class RaisesForWhoHasEnded(TieredManager):
    """The abort of a sequence that has ended by itself raises."""

    def release(self, name: str) -> None:
        if name not in self.tables:
            raise KeyError(name)
        super().release(name)


@planted("vllm#46014, vllm-ascend#16662", "no_block_lost", "host_conserved", "all_come_back", "no_unexpected_error")
class LeaksAnAbortedSwap(TieredManager):
    """The end of a sequence that is on the host forgets its host blocks."""

    def release(self, name: str) -> None:
        if name in self.swapped:
            self.swapped.remove(name)
            del self.tables[name]
        super().release(name)


# -------------------------------------------------------------------- stale or wrong content


@planted("vllm#34526, sglang#30233", "hit_was_written", "hit_is_its_prefix")
class PublishesWhatIsNotComputed(TieredManager):
    """The blocks of a prompt may be found from their allocation on, before their KV is computed."""

    def allocate(self, name: str, tokens: Sequence[int], upto: int, salt: str = "") -> int | None:
        cached = super().allocate(name, tokens, upto, salt)
        if cached is not None:
            self.publish(name, tokens)
            self.computed[name] = list(tokens[:cached])
        return cached


@planted("LMCache#4492, LMCache#4991", "hit_is_its_prefix", "hit_was_written", "reset_forgets", under=Stored)
class StoresTheNextBlockInstead(TieredManager):
    """A store that fails is tried again, with the block that comes next and the key of the one that failed."""

    def persist(self, name: str) -> None:
        numbers = iter(self.tables[name])
        for (key, _), number in zip(self.keys(self.computed[name], self.roots[name]), numbers, strict=False):
            try:
                self.copies.put(key, number)
            except MoveFailed:
                self.copies.put(key, next(numbers, number))


@planted("vllm#57727", "reset_forgets", under=Stored)
class ResetLeavesTheStore(TieredManager):
    """New weights empty the device's cache; the store's keys do not tell the weights apart."""

    def reset(self) -> None:
        for block in self.blocks:
            self.forget(block)


@planted("lmdeploy#4917", "reset_forgets", "hit_is_its_prefix", under=OnlyResets)
class PublishesAcrossAReset(TieredManager):
    """A sequence that was there before the weights changed publishes under the new ones."""

    def reset(self) -> None:
        super().reset()
        self.roots = dict.fromkeys(self.roots, self.root(""))


@planted("vllm#44701", "salts_apart", "hit_is_its_prefix")
class IgnoresTheSalt(TieredManager):
    """What keeps tenants apart does not reach the key."""

    def root(self, salt: str) -> int:
        return super().root("")


@planted("openvino.genai#3722", "hit_is_its_prefix", "salts_apart", "reset_forgets")
class TrustsAShortHash(TieredManager):
    """A hash of few bits, and nobody compares the tokens."""

    def keys(self, tokens: Sequence[int], root: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        return ((key % 31, part) for key, part in super().keys(tokens, root))

    def same(self, block: Block, part: tuple[int, ...]) -> bool:
        return True


@planted("LMCache#4385", "hit_is_its_prefix", "salts_apart", "reset_forgets")
class ChainsNoHash(TieredManager):
    """A key says its own block's tokens, and nothing of what comes before them."""

    def keys(self, tokens: Sequence[int], root: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        return ((hash((root, part)), part) for _, part in super().keys(tokens, root))


@planted("vllm#52234", "hit_is_its_prefix", "salts_apart", "reset_forgets", "hit_was_written")
class KeepsAStaleKey(TieredManager):
    """A block that is handed out again is still found under its old key."""

    def take(self) -> int:
        block = self.blocks[self.unheld.popleft()]
        block.holders = 1
        return block.number

    def publish(self, name: str, tokens: Sequence[int]) -> None:
        for number in self.tables[name]:
            if self.blocks[number].holders == 1:
                self.blocks[number].key = None
        super().publish(name, tokens)

    def same(self, block: Block, part: tuple[int, ...]) -> bool:
        return True


@planted("sglang#24527, vllm PR35092", "shared_not_written", "content_survives")
class WritesASharedBlock(TieredManager):
    """The partial last block of a fork is not copied before it is written."""

    def append(self, name: str, upto: int) -> bool:
        return NanoManager.append(self, name, upto)


@planted("-", "hit_leaves_one")
class LeavesNothingToCompute(TieredManager):
    """A prompt that is cached whole is a hit whole: there are no logits to sample its next token from."""

    def find(self, tokens: Sequence[int], root: int) -> list[int]:
        return super().find([*tokens, 0], root)


@planted("this project's own, found by the kit", "held_is_found", under=OnlyPrefixes)
class LosesATwin(TieredManager):
    """Two sequences compute one prefix; when the first one's block is handed out again, the second's is not found."""

    def forget(self, block: Block) -> None:
        if block.key is not None and self.by_key.get(block.key) == block.number:
            del self.by_key[block.key]
        block.key, block.tokens = None, ()
