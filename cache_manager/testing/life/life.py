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


class Life:
    """Plays operations, which are the methods ``do_...``, in its ``world``."""

    def __init__(self, adapter: type[BlockManagerAdapter], counts: Counter[str]) -> None:
        self.world = World(adapter, counts)
        self.world.kv.watch = partial(claims.check_copies, self.world)

    def play(self, operation: Operation) -> None:
        """Play one operation. Raises :class:`InvariantBroken` if a claim does not hold."""
        self.world.program.append(operation)
        method: Callable[..., None] = getattr(self, f"do_{operation[0]}")
        method(*operation[1:])

    def close(self) -> None:
        if self.world.failure is None:
            self.world.ask("close")
        else:
            with suppress(Exception):  # the first finding counts
                self.world.manager.close()

    # ---------------------------------------------------------------- parts of operations

    def _end(self, *touched: str) -> None:
        self.world.after = self.world.look()
        claims.check_all(self.world, *touched)

    def _refused(self, needs: int | None = None, *, of_host: bool = False) -> None:
        """The operation was refused, or a copy failed; with ``needs`` free blocks a refusal is a fault."""
        if not self.world.kv.failed:
            self.world.tell(" -> refused")
            self.world.counts["refusals"] += 1
        self.world.after = self.world.look()
        claims.check_unchanged(self.world)
        free = self.world.before.host_free if of_host else self.world.before.free
        if not (self.world.kv.failed or needs is None or free is None) and needs <= free:
            self.world.fail("refusal_is_honest", f"{needs} blocks were asked for at most, and {free} are free")

    def _ready(self, name: str, more: int = 0, capability: str = "") -> Sequence | None:
        """The sequence, if it runs and can have ``more`` tokens, and if the manager is ``capability``."""
        sequence = self.world.live.get(name)
        if sequence is None or sequence.swapped or sequence.waiting or (capability and not self.world.can(capability)):
            return None
        return sequence if len(sequence.tokens) + more <= self.world.capacity * self.world.size else None

    def _grow(self, sequence: Sequence, upto: int, *, fail: bool = False) -> bool:
        """Have the manager make room for the positions below ``upto``: by new blocks, and copies of shared ones."""
        name = sequence.name
        first = sequence.computed // self.world.size
        if self.world.call("grow", name, list(sequence.tokens), upto, fail=fail):
            self.world.after = self.world.look()
            claims.check_fresh(self.world, name, first)
            return True
        table = self.world.before.tables[name]
        holders = self.world.holders(self.world.before)
        shared = sum(block is not None and len(holders[block]) > 1 for block in table[first:])
        self._refused(max(0, -(-upto // self.world.size) - len(table)) + shared)
        return False

    def _forward(self, sequence: Sequence, upto: int, *, rows: bool = True) -> None:
        """The forward pass of the positions up to ``upto``: KV at their slots, and rows beside it."""
        start = sequence.computed
        at = sequence.contents[-1] if sequence.contents else self.world.beginning(sequence.salt)
        slots = self.world.ask("slots", sequence.name, start, upto)
        claims.check_written(self.world, sequence, start, slots)
        serials = []
        for (block, offset), token in zip(slots, sequence.tokens[start:upto], strict=True):
            at = at.then(token, self.world.version)
            sequence.contents.append(at)
            self.world.serial += 1
            serials.append(self.world.serial)
            self.world.kv.write(block, offset, Cell(at, sequence.name, len(self.world.story), self.world.serial, rows))
        self.world.counts["tokens computed"] += len(serials)
        if self.world.can("rows"):
            self.world.call("write_rows", sequence.name, start, serials if rows else [None] * len(serials))

    def _compute(self, sequence: Sequence, upto: int, *, rows: bool) -> None:
        self._forward(sequence, upto, rows=rows)
        self.world.call("commit", sequence.name, sequence.tokens[:upto])
        self._end(sequence.name)

    def _drop(self, sequence: Sequence) -> None:
        self.world.call("free", sequence.name)
        del self.world.live[sequence.name]
        self.world.past = [*self.world.past[1 - PAST_MAX :], sequence.tokens]

    # ---------------------------------------------------------------- operations

    def do_admit(self, name: str, tokens: list[int], chunk: int, salt: str, rows: bool, fail: bool) -> None:
        """A new request, and the first chunk of its prefill."""
        if name in self.world.live or not tokens or len(tokens) > self.world.capacity * self.world.size:
            return
        salt = salt if self.world.can("salt") else ""
        self.world.begin(f"admit {name} {tokens}{f' under salt {salt!r}' if salt else ''}")
        cached = self.world.call("admit", name, list(tokens), chunk, salt, fail=fail)
        if cached is None:
            self._refused(-(-len(tokens) // self.world.size))
            return
        sequence = self.world.live[name] = Sequence(name, list(tokens), salt)
        sequence.waiting = self.world.can("background") and bool(self.world.ask("waits", name))
        self.world.after = self.world.look()
        self.world.tell(f" -> {blocks(self.world.after.tables[name])}, {cached} tokens cached")
        claims.check_hit(self.world, sequence, cached)
        claims.check_fresh(self.world, name, -(-cached // self.world.size))
        self.world.counts["prefix"] += cached > 0
        self.world.counts["salt"] += bool(salt)
        if self.world.adapter.finds_held and self.world.can("prefix"):
            claims.check_found(self.world, sequence, cached)
        if sequence.waiting:
            self.world.tell(", waits for more")
            self._end(name)
            return
        upto = min(len(tokens), cached + chunk)
        self.world.tell(f", computes [{cached}, {upto})")
        self._compute(sequence, upto, rows=rows)

    def do_step(self, name: str, more: list[int], chunk: int, rows: bool, fail: bool) -> None:
        """The next chunk of a prompt, or tokens that were decoded."""
        sequence = self._ready(name, len(more))
        if sequence is None or sequence.computed == len(sequence.tokens) + len(more):
            return
        upto = min(len(sequence.tokens) + len(more), sequence.computed + chunk)
        self.world.begin(f"step {name}{f' + {more}' if more else ''} computes [{sequence.computed}, {upto})")
        sequence.tokens += more
        if self._grow(sequence, upto, fail=fail):
            self._compute(sequence, upto, rows=rows)

    def do_decode(self, names: list[str], token: int, rows: bool) -> None:
        """One more token of each of some sequences, in one step."""
        ready = [sequence for name in dict.fromkeys(names) if (sequence := self._ready(name, 1)) is not None]
        if not ready:
            return
        self.world.begin(f"decode one token of {' and '.join(sequence.name for sequence in ready)}")
        for sequence in ready:
            if sequence.computed == len(sequence.tokens):
                sequence.tokens.append(token)
        given = {sequence.name: sequence.tokens[: sequence.computed + 1] for sequence in ready}
        answers = self.world.call("grow_batch", given)
        self.world.after = self.world.look()
        fits = [sequence for sequence, fit in zip(ready, answers, strict=True) if fit]
        for sequence in ready:
            if sequence in fits:
                claims.check_fresh(self.world, sequence.name, sequence.computed // self.world.size)
            elif self.world.before.tables[sequence.name] != self.world.after.tables[sequence.name]:
                self.world.fail("refusal_changes_nothing", f"{sequence.name} was refused, and has other blocks")
        if len(fits) < len(ready):
            self.world.tell(f" -> room for {' and '.join(sequence.name for sequence in fits) or 'none'}")
            self.world.counts["refusals"] += 1
        for sequence in fits:
            self._forward(sequence, len(given[sequence.name]), rows=rows)
        self.world.call("commit_batch", {sequence.name: given[sequence.name] for sequence in fits})
        self.world.counts["sequences decoded together"] += len(fits) > 1
        self._end(*given)

    def do_draft(self, name: str, drafts: list[int], accepted: int) -> None:
        """A step that computes draft tokens, the last of which are rejected."""
        sequence = self._ready(name, len(drafts), "drafts")
        if sequence is None or not drafts or sequence.computed != len(sequence.tokens):
            return
        start = sequence.computed
        keep = min(accepted, len(drafts) - 1)
        self.world.begin(f"step {name} computes the drafts {drafts}, and {keep} of them are accepted")
        sequence.tokens += drafts
        if not self._grow(sequence, start + len(drafts)):
            del sequence.tokens[start:]
            return
        self._forward(sequence, start + len(drafts))
        del sequence.contents[start + keep :], sequence.tokens[start + keep :]
        self.world.call("commit", name, list(sequence.tokens))
        self.world.counts["drafts"] += 1
        self._end(name)

    def do_free(self, name: str, again: bool) -> None:
        """A sequence has finished, in whatever state it is; some engines say so twice."""
        sequence = self.world.live.get(name)
        if sequence is None:
            return
        self.world.begin(f"free {name}{' twice' if again else ''}")
        self._drop(sequence)
        if again:
            free = self.world.look().free
            self.world.call("free", name)
            if (now := self.world.look().free) != free:
                self.world.fail(
                    "free_is_final", f"the second free() changed the number of free blocks from {free} to {now}"
                )
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
        self.world.begin(text.format(name, f" + {more}" if more else "", sequence.computed, upto))
        if not self._grow(sequence, upto):
            return
        if capability == "abort":
            self._forward(sequence, upto)
        self._drop(sequence)
        self.world.counts[capability] += 1
        self._end()

    # Freed while its step runs: the step's KV still lands, before any other write.
    do_abort = partialmethod(_leave, capability="abort", text="free {}{} while it computes [{}, {})")
    # Freed after room was made for a step that never runs.
    do_lose = partialmethod(_leave, capability="lost_step", text="free {}{}, its step [{}, {}) is lost")

    def do_fork(self, name: str, child: str) -> None:
        """Parallel sampling, beams: the child goes on from the parent's computed tokens."""
        parent = self._ready(name, 0, "fork")
        if parent is None or not parent.computed or child in self.world.live:
            return
        self.world.begin(f"fork {name} as {child}")
        if not self.world.call("fork", name, child):
            self._refused()
            return
        contents = list(parent.contents)
        self.world.live[child] = Sequence(child, parent.tokens[: len(contents)], parent.salt, contents)
        self.world.counts["fork"] += 1
        self._end(child)
        self.world.tell(f" -> {blocks(self.world.after.tables[child])}")

    def do_swap(self, name: str, fail: bool) -> None:
        """Preempted by swapping out; or swapped back in, if it was out."""
        sequence = self.world.live.get(name)
        if not self.world.can("swap") or sequence is None or sequence.waiting:
            return
        method = "resume" if sequence.swapped else "preempt"
        self.world.begin(f"{method} {name}")
        if not self.world.call(method, name, fail=fail):
            self._refused(len(self.world.before.tables[name]), of_host=not sequence.swapped)
            return
        sequence.swapped = not sequence.swapped
        self.world.counts["swap"] += not sequence.swapped
        self._end(name)
        self.world.tell(f" -> {blocks(self.world.after.tables[name])}")

    def do_persist(self, name: str, fail: bool) -> None:
        """The full blocks are stored."""
        if self._ready(name, 0, "store") is not None:
            self.world.begin(f"persist {name}")
            self.world.call("persist", name, fail=fail)
            self._end()

    def do_settle(self, fail: bool) -> None:
        """A piece of background work ends."""
        if not self.world.can("background"):
            return
        self.world.begin("background work ends")
        self.world.counts["background"] += 1
        answer: Mapping[str, int] = self.world.call("settle", fail=fail) or {}
        self.world.after = self.world.look()
        for name, cached in answer.items():
            sequence = self.world.live.get(name)
            if sequence is None or not sequence.waiting:
                self.world.fail("background_ends", f"{name} waits no longer, and did not wait")
                continue
            sequence.waiting = False
            self.world.tell(f" -> {name} has {cached} tokens cached")
            claims.check_hit(self.world, sequence, cached)
        self._end(*answer)

    def do_reset(self, end_first: bool) -> None:
        """New weights, with sequences that go on or without any."""
        if not self.world.can("reset") or self.world.version == VERSIONS_MAX:
            return
        if end_first:
            self._end_all()
        self.world.begin("reset: new weights")
        if self.world.call("reset"):
            self.world.version += 1
            self.world.counts["reset"] += 1
            self._end()
        else:
            self._refused()
            if end_first:
                self.world.fail("refusal_is_honest", "a reset was refused while no sequence was there")

    def do_restart(self) -> None:
        """The process ends and begins anew, with only the store's content."""
        if self.world.can("restart"):
            self._end_all()
            self.world.begin("restart: what was not stored is lost")
            self.world.call("restart")
            self.world.kv.forget()
            self.world.counts["restart"] += 1
            self._end()

    def _end_all(self) -> None:
        for name in list(self.world.live):
            self.do_free(name, False)

    def do_finish(self) -> None:
        """Every sequence ends; then one sequence can have all blocks."""
        full = self.world.capacity * self.world.size
        self._end_all()
        if self.world.after.free != self.world.capacity:
            self.world.fail("all_come_back", f"{self.world.after.free} of {self.world.capacity} blocks are free")
        if self.world.adapter.window is not None:
            return
        self.world.begin(f"admit all: {full} new tokens, which need every block")
        if self.world.call("admit", "all", [2] * full, full, "") is None:
            self.world.after = self.world.look()
            wanted = f"a sequence of {self.world.capacity} blocks"
            self.world.fail("all_come_back", f"{wanted} was refused, and {self.world.after.free} are free")
            return
        self.world.live["all"] = Sequence("all", [2] * full, "")
        self._end("all")
        if not self.world.can("background") or not self.world.ask("waits", "all"):
            self.world.call("grow", "all", [2] * full, full)
        self.world.after = self.world.look()
        if len(set(self.world.after.tables["all"])) != self.world.capacity:
            self.world.fail("all_come_back", f"the sequence got {blocks(self.world.after.tables['all'])}")
        self.do_free("all", False)
