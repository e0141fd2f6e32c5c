"""The life of sequences, as an engine's scheduler leads it, with every claim checked after every operation.

An operation that makes no sense now, for example about a sequence that is not there, does nothing: a program stays
valid without some of its operations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial, partialmethod
from typing import Final

from cache_manager.testing.life import claims
from cache_manager.testing.life.adapter import BlockManagerAdapter
from cache_manager.testing.life.canary import Cell
from cache_manager.testing.life.invariants import Operation
from cache_manager.testing.life.world import Sequence, World, blocks

VERSIONS_MAX: Final = 3
PAST_MAX: Final = 8


class Life(World):
    """Plays operations, which are the methods ``do_...``."""

    def __init__(self, adapter: type[BlockManagerAdapter], counts: Counter[str]) -> None:
        super().__init__(adapter, counts)
        self.kv.watch = partial(claims.check_copies, self)

    def play(self, operation: Operation) -> None:
        """Play one operation. Raises :class:`InvariantBroken` if a claim does not hold."""
        self.program.append(operation)
        method: Callable[..., None] = getattr(self, f"do_{operation[0]}")
        method(*operation[1:])

    def close(self) -> None:
        if self.failure is None:
            self.ask("close")
        else:
            with suppress(Exception):  # the first finding counts
                self.manager.close()

    # ---------------------------------------------------------------- parts of operations

    def _end(self, *touched: str) -> None:
        self.after = self.look()
        claims.check_all(self, *touched)

    def _refused(self, needs: int | None = None, *, of_host: bool = False) -> None:
        """The operation was refused, or a copy failed; with ``needs`` free blocks a refusal is a fault."""
        if not self.kv.failed:
            self.tell(" -> refused")
            self.counts["refusals"] += 1
        self.after = self.look()
        claims.check_unchanged(self)
        free = self.before.host_free if of_host else self.before.free
        if not (self.kv.failed or needs is None or free is None) and needs <= free:
            self.fail("refusal_is_honest", f"{needs} blocks were asked for at most, and {free} are free")

    def _ready(self, name: str, more: int = 0, capability: str = "") -> Sequence | None:
        """The sequence, if it runs and can have ``more`` tokens, and if the manager is ``capability``."""
        sequence = self.live.get(name)
        if sequence is None or sequence.swapped or sequence.waiting or (capability and not self.can(capability)):
            return None
        return sequence if len(sequence.tokens) + more <= self.capacity * self.size else None

    def _grow(self, sequence: Sequence, upto: int, *, fail: bool = False) -> bool:
        """Have the manager make room for the positions below ``upto``: by new blocks, and copies of shared ones."""
        name = sequence.name
        first = sequence.computed // self.size
        if self.call("grow", name, list(sequence.tokens), upto, fail=fail):
            self.after = self.look()
            claims.check_fresh(self, name, first)
            return True
        table = self.before.tables[name]
        holders = self.holders(self.before)
        shared = sum(block is not None and len(holders[block]) > 1 for block in table[first:])
        self._refused(max(0, -(-upto // self.size) - len(table)) + shared)
        return False

    def _forward(self, sequence: Sequence, upto: int, *, rows: bool = True) -> None:
        """The forward pass of the positions up to ``upto``: KV at their slots, and rows beside it."""
        start = sequence.computed
        at = sequence.contents[-1] if sequence.contents else self.beginning(sequence.salt)
        slots = self.ask("slots", sequence.name, start, upto)
        claims.check_written(self, sequence, start, slots)
        serials = []
        for (block, offset), token in zip(slots, sequence.tokens[start:upto], strict=True):
            at = at.then(token, self.version)
            sequence.contents.append(at)
            self.serial += 1
            serials.append(self.serial)
            self.kv.write(block, offset, Cell(at, sequence.name, len(self.story), self.serial, rows))
        self.counts["tokens computed"] += len(serials)
        if self.can("rows"):
            self.call("write_rows", sequence.name, start, serials if rows else [None] * len(serials))

    def _compute(self, sequence: Sequence, upto: int, *, rows: bool) -> None:
        self._forward(sequence, upto, rows=rows)
        self.call("commit", sequence.name, sequence.tokens[:upto])
        self._end(sequence.name)

    def _drop(self, sequence: Sequence) -> None:
        self.call("free", sequence.name)
        del self.live[sequence.name]
        self.past = [*self.past[1 - PAST_MAX :], sequence.tokens]

    # ---------------------------------------------------------------- operations

    def do_admit(self, name: str, tokens: list[int], chunk: int, salt: str, rows: bool, fail: bool) -> None:
        """A new request, and the first chunk of its prefill."""
        if name in self.live or not tokens or len(tokens) > self.capacity * self.size:
            return
        salt = salt if self.can("salt") else ""
        self.begin(f"admit {name} {tokens}{f' under salt {salt!r}' if salt else ''}")
        cached = self.call("admit", name, list(tokens), chunk, salt, fail=fail)
        if cached is None:
            self._refused(-(-len(tokens) // self.size))
            return
        sequence = self.live[name] = Sequence(name, list(tokens), salt)
        sequence.waiting = self.can("background") and bool(self.ask("waits", name))
        self.after = self.look()
        self.tell(f" -> {blocks(self.after.tables[name])}, {cached} tokens cached")
        claims.check_hit(self, sequence, cached)
        claims.check_fresh(self, name, -(-cached // self.size))
        self.counts["prefix"] += cached > 0
        self.counts["salt"] += bool(salt)
        if self.adapter.finds_held and self.can("prefix"):
            claims.check_found(self, sequence, cached)
        if sequence.waiting:
            self.tell(", waits for more")
            self._end(name)
            return
        upto = min(len(tokens), cached + chunk)
        self.tell(f", computes [{cached}, {upto})")
        self._compute(sequence, upto, rows=rows)

    def do_step(self, name: str, more: list[int], chunk: int, rows: bool, fail: bool) -> None:
        """The next chunk of a prompt, or tokens that were decoded."""
        sequence = self._ready(name, len(more))
        if sequence is None or sequence.computed == len(sequence.tokens) + len(more):
            return
        upto = min(len(sequence.tokens) + len(more), sequence.computed + chunk)
        self.begin(f"step {name}{f' + {more}' if more else ''} computes [{sequence.computed}, {upto})")
        sequence.tokens += more
        if self._grow(sequence, upto, fail=fail):
            self._compute(sequence, upto, rows=rows)

    def do_decode(self, names: list[str], token: int, rows: bool) -> None:
        """One more token of each of some sequences, in one step."""
        ready = [sequence for name in dict.fromkeys(names) if (sequence := self._ready(name, 1)) is not None]
        if not ready:
            return
        self.begin(f"decode one token of {' and '.join(sequence.name for sequence in ready)}")
        for sequence in ready:
            if sequence.computed == len(sequence.tokens):
                sequence.tokens.append(token)
        given = {sequence.name: sequence.tokens[: sequence.computed + 1] for sequence in ready}
        answers = self.call("grow_batch", given)
        self.after = self.look()
        fits = [sequence for sequence, fit in zip(ready, answers, strict=True) if fit]
        for sequence in ready:
            if sequence in fits:
                claims.check_fresh(self, sequence.name, sequence.computed // self.size)
            elif self.before.tables[sequence.name] != self.after.tables[sequence.name]:
                self.fail("refusal_changes_nothing", f"{sequence.name} was refused, and has other blocks")
        if len(fits) < len(ready):
            self.tell(f" -> room for {' and '.join(sequence.name for sequence in fits) or 'none'}")
            self.counts["refusals"] += 1
        for sequence in fits:
            self._forward(sequence, len(given[sequence.name]), rows=rows)
        self.call("commit_batch", {sequence.name: given[sequence.name] for sequence in fits})
        self.counts["sequences decoded together"] += len(fits) > 1
        self._end(*given)

    def do_draft(self, name: str, drafts: list[int], accepted: int) -> None:
        """A step that computes draft tokens, the last of which are rejected."""
        sequence = self._ready(name, len(drafts), "drafts")
        if sequence is None or not drafts or sequence.computed != len(sequence.tokens):
            return
        start = sequence.computed
        keep = min(accepted, len(drafts) - 1)
        self.begin(f"step {name} computes the drafts {drafts}, and {keep} of them are accepted")
        sequence.tokens += drafts
        if not self._grow(sequence, start + len(drafts)):
            del sequence.tokens[start:]
            return
        self._forward(sequence, start + len(drafts))
        del sequence.contents[start + keep :], sequence.tokens[start + keep :]
        self.call("commit", name, list(sequence.tokens))
        self.counts["drafts"] += 1
        self._end(name)

    def do_free(self, name: str, again: bool) -> None:
        """A sequence has finished, in whatever state it is; some engines say so twice."""
        sequence = self.live.get(name)
        if sequence is None:
            return
        self.begin(f"free {name}{' twice' if again else ''}")
        self._drop(sequence)
        if again:
            free = self.look().free
            self.call("free", name)
            if (now := self.look().free) != free:
                self.fail("free_is_final", f"the second free() changed the number of free blocks from {free} to {now}")
        self._end()

    def do_recompute(self, name: str, chunk: int) -> None:
        """Preempted by recomputation: freed, and admitted again with all its tokens."""
        if (sequence := self._ready(name)) is not None:
            self.do_free(name, False)
            self.do_admit(name, sequence.tokens, chunk, sequence.salt, True, False)

    def _leave(self, name: str, more: list[int], *, capability: str, text: str) -> None:
        sequence = self._ready(name, len(more), capability)
        if sequence is None or sequence.computed == len(sequence.tokens) + len(more):
            return
        sequence.tokens += more
        upto = len(sequence.tokens)
        self.begin(text.format(name, f" + {more}" if more else "", sequence.computed, upto))
        if not self._grow(sequence, upto):
            return
        if capability == "abort":
            self._forward(sequence, upto)
        self._drop(sequence)
        self.counts[capability] += 1
        self._end()

    # Freed while its step runs: the step's KV still lands, before any other write.
    do_abort = partialmethod(_leave, capability="abort", text="free {}{} while it computes [{}, {})")
    # Freed after room was made for a step that never runs.
    do_lose = partialmethod(_leave, capability="lost_step", text="free {}{}, its step [{}, {}) is lost")

    def do_fork(self, name: str, child: str) -> None:
        """Parallel sampling, beams: the child goes on from the parent's computed tokens."""
        parent = self._ready(name, 0, "fork")
        if parent is None or not parent.computed or child in self.live:
            return
        self.begin(f"fork {name} as {child}")
        if not self.call("fork", name, child):
            self._refused()
            return
        contents = list(parent.contents)
        self.live[child] = Sequence(child, parent.tokens[: len(contents)], parent.salt, contents)
        self.counts["fork"] += 1
        self._end(child)
        self.tell(f" -> {blocks(self.after.tables[child])}")

    def do_swap(self, name: str, fail: bool) -> None:
        """Preempted by swapping out; or swapped back in, if it was out."""
        sequence = self.live.get(name)
        if not self.can("swap") or sequence is None or sequence.waiting:
            return
        method = "resume" if sequence.swapped else "preempt"
        self.begin(f"{method} {name}")
        if not self.call(method, name, fail=fail):
            self._refused(len(self.before.tables[name]), of_host=not sequence.swapped)
            return
        sequence.swapped = not sequence.swapped
        self.counts["swap"] += not sequence.swapped
        self._end(name)
        self.tell(f" -> {blocks(self.after.tables[name])}")

    def do_persist(self, name: str, fail: bool) -> None:
        """The full blocks are stored."""
        if self._ready(name, 0, "store") is not None:
            self.begin(f"persist {name}")
            self.call("persist", name, fail=fail)
            self._end()

    def do_settle(self, fail: bool) -> None:
        """A piece of background work ends."""
        if not self.can("background"):
            return
        self.begin("background work ends")
        self.counts["background"] += 1
        answer: Mapping[str, int] = self.call("settle", fail=fail) or {}
        self.after = self.look()
        for name, cached in answer.items():
            sequence = self.live.get(name)
            if sequence is None or not sequence.waiting:
                self.fail("background_ends", f"{name} waits no longer, and did not wait")
                continue
            sequence.waiting = False
            self.tell(f" -> {name} has {cached} tokens cached")
            claims.check_hit(self, sequence, cached)
        self._end(*answer)

    def do_reset(self, end_first: bool) -> None:
        """New weights, with sequences that go on or without any."""
        if not self.can("reset") or self.version == VERSIONS_MAX:
            return
        if end_first:
            self._end_all()
        self.begin("reset: new weights")
        if self.call("reset"):
            self.version += 1
            self.counts["reset"] += 1
            self._end()
        else:
            self._refused()
            if end_first:
                self.fail("refusal_is_honest", "a reset was refused while no sequence was there")

    def do_restart(self) -> None:
        """The process ends and begins anew, with only the store's content."""
        if self.can("restart"):
            self._end_all()
            self.begin("restart: what was not stored is lost")
            self.call("restart")
            self.kv.forget()
            self.counts["restart"] += 1
            self._end()

    def _end_all(self) -> None:
        for name in list(self.live):
            self.do_free(name, False)

    def do_finish(self) -> None:
        """Every sequence ends; then one sequence can have all blocks."""
        full = self.capacity * self.size
        self._end_all()
        if self.after.free != self.capacity:
            self.fail("all_come_back", f"{self.after.free} of {self.capacity} blocks are free")
        if self.adapter.window is not None:
            return
        self.begin(f"admit all: {full} new tokens, which need every block")
        if self.call("admit", "all", [2] * full, full, "") is None:
            self.after = self.look()
            wanted = f"a sequence of {self.capacity} blocks"
            self.fail("all_come_back", f"{wanted} was refused, and {self.after.free} are free")
            return
        self.live["all"] = Sequence("all", [2] * full, "")
        self._end("all")
        if not self.can("background") or not self.ask("waits", "all"):
            self.call("grow", "all", [2] * full, full)
        self.after = self.look()
        if len(set(self.after.tables["all"])) != self.capacity:
            self.fail("all_come_back", f"the sequence got {blocks(self.after.tables['all'])}")
        self.do_free("all", False)
