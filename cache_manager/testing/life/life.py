"""The life of sequences, as an engine's scheduler leads it, with every claim checked after every operation.

An operation that makes no sense now, for example about a sequence that is not there, does nothing: a program stays
valid without some of its operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partialmethod
from typing import Final

from cache_manager.testing.life import claims
from cache_manager.testing.life.canary import Cell
from cache_manager.testing.life.invariants import Operation
from cache_manager.testing.life.world import Sequence, World, blocks

VERSIONS_MAX: Final = 3
PAST_MAX: Final = 8


class Life:
    """Plays operations, which are the methods ``do_...``."""

    def __init__(self, world: World) -> None:
        self.world = world
        world.kv.watch = lambda kind, pairs: claims.check_copies(world, kind, pairs)

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

    def _see(self) -> None:
        self.world.after = self.world.look()

    def _end(self, *touched: str) -> None:
        self._see()
        claims.check_all(self.world, *touched)

    def _refused(self, needs: int | None = None, *, of_host: bool = False) -> None:
        """The operation was refused, or a copy failed; with ``needs`` free blocks a refusal is a fault."""
        world = self.world
        if not world.kv.failed:
            world.tell(" -> refused")
            world.counts["refusals"] += 1
        self._see()
        claims.check_unchanged(world)
        free = world.before.host_free if of_host else world.before.free
        if not (world.kv.failed or needs is None or free is None) and needs <= free:
            world.fail("refusal_is_honest", f"{needs} blocks were asked for at most, and {free} are free")

    def _ready(self, name: str, more: int = 0, capability: str = "") -> Sequence | None:
        """The sequence, if it runs and can have ``more`` tokens, and if the manager is ``capability``."""
        world, sequence = self.world, self.world.live.get(name)
        if sequence is None or sequence.swapped or sequence.waiting or (capability and not world.can(capability)):
            return None
        return sequence if len(sequence.tokens) + more <= world.capacity * world.size else None

    def _grow(self, sequence: Sequence, upto: int, *, fail: bool = False) -> bool:
        """Have the manager make room for the positions below ``upto``: by new blocks, and copies of shared ones."""
        world, name, first = self.world, sequence.name, sequence.computed // self.world.size
        if world.call("grow", name, list(sequence.tokens), upto, fail=fail):
            self._see()
            claims.check_fresh(world, name, first)
            return True
        table, holders = world.before.tables[name], world.holders(world.before)
        shared = sum(block is not None and len(holders[block]) > 1 for block in table[first:])
        self._refused(max(0, -(-upto // world.size) - len(table)) + shared)
        return False

    def _forward(self, sequence: Sequence, upto: int, *, rows: bool = True) -> None:
        """The forward pass of the positions up to ``upto``: KV at their slots, and rows beside it."""
        world, start = self.world, sequence.computed
        at = sequence.contents[-1] if sequence.contents else world.beginning(sequence.salt)
        slots = world.ask("slots", sequence.name, start, upto)
        claims.check_written(world, sequence, start, slots)
        serials = []
        for (block, offset), token in zip(slots, sequence.tokens[start:upto], strict=True):
            at = at.then(token, world.version)
            sequence.contents.append(at)
            world.serial += 1
            serials.append(world.serial)
            world.kv.write(block, offset, Cell(at, sequence.name, len(world.story), world.serial, rows))
        world.counts["tokens computed"] += len(serials)
        if world.can("rows"):
            world.call("write_rows", sequence.name, start, serials if rows else [None] * len(serials))

    def _compute(self, sequence: Sequence, upto: int, *, rows: bool) -> None:
        self._forward(sequence, upto, rows=rows)
        self.world.call("commit", sequence.name, sequence.tokens[:upto])
        self._end(sequence.name)

    def _drop(self, sequence: Sequence) -> None:
        world = self.world
        world.call("free", sequence.name)
        del world.live[sequence.name]
        world.past = [*world.past[1 - PAST_MAX :], sequence.tokens]

    # ---------------------------------------------------------------- operations

    def do_admit(self, name: str, tokens: list[int], chunk: int, salt: str, rows: bool, fail: bool) -> None:
        """A new request, and the first chunk of its prefill."""
        world = self.world
        if name in world.live or not tokens or len(tokens) > world.capacity * world.size:
            return
        salt = salt if world.can("salt") else ""
        world.begin(f"admit {name} {tokens}{f' under salt {salt!r}' if salt else ''}")
        cached = world.call("admit", name, list(tokens), chunk, salt, fail=fail)
        if cached is None:
            self._refused(-(-len(tokens) // world.size))
            return
        sequence = world.live[name] = Sequence(name, list(tokens), salt)
        sequence.waiting = world.can("background") and bool(world.ask("waits", name))
        self._see()
        world.tell(f" -> {blocks(world.after.tables[name])}, {cached} tokens cached")
        claims.check_hit(world, sequence, cached)
        claims.check_fresh(world, name, -(-cached // world.size))
        world.counts["prefix"] += cached > 0
        world.counts["salt"] += bool(salt)
        if world.adapter.finds_held and world.can("prefix"):
            claims.check_found(world, sequence, cached)
        if sequence.waiting:
            world.tell(", waits for more")
            self._end(name)
            return
        upto = min(len(tokens), cached + chunk)
        world.tell(f", computes [{cached}, {upto})")
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
        world = self.world
        ready = [sequence for name in dict.fromkeys(names) if (sequence := self._ready(name, 1)) is not None]
        if not ready:
            return
        world.begin(f"decode one token of {' and '.join(sequence.name for sequence in ready)}")
        for sequence in ready:
            if sequence.computed == len(sequence.tokens):
                sequence.tokens.append(token)
        given = {sequence.name: sequence.tokens[: sequence.computed + 1] for sequence in ready}
        answers = world.call("grow_batch", given)
        self._see()
        fits = [sequence for sequence, fit in zip(ready, answers, strict=True) if fit]
        for sequence in ready:
            if sequence in fits:
                claims.check_fresh(world, sequence.name, sequence.computed // world.size)
            elif world.before.tables[sequence.name] != world.after.tables[sequence.name]:
                world.fail("refusal_changes_nothing", f"{sequence.name} was refused, and has other blocks")
        if len(fits) < len(ready):
            world.tell(f" -> room for {' and '.join(sequence.name for sequence in fits) or 'none'}")
            world.counts["refusals"] += 1
        for sequence in fits:
            self._forward(sequence, len(given[sequence.name]), rows=rows)
        world.call("commit_batch", {sequence.name: given[sequence.name] for sequence in fits})
        world.counts["sequences decoded together"] += len(fits) > 1
        self._end(*given)

    def do_draft(self, name: str, drafts: list[int], accepted: int) -> None:
        """A step that computes draft tokens, the last of which are rejected."""
        world, sequence = self.world, self._ready(name, len(drafts), "drafts")
        if sequence is None or not drafts or sequence.computed != len(sequence.tokens):
            return
        start, keep = sequence.computed, min(accepted, len(drafts) - 1)
        world.begin(f"step {name} computes the drafts {drafts}, and {keep} of them are accepted")
        sequence.tokens += drafts
        if not self._grow(sequence, start + len(drafts)):
            del sequence.tokens[start:]
            return
        self._forward(sequence, start + len(drafts))
        del sequence.contents[start + keep :], sequence.tokens[start + keep :]
        world.call("commit", name, list(sequence.tokens))
        world.counts["drafts"] += 1
        self._end(name)

    def do_free(self, name: str, again: bool) -> None:
        """A sequence has finished, in whatever state it is; some engines say so twice."""
        world, sequence = self.world, self.world.live.get(name)
        if sequence is None:
            return
        world.begin(f"free {name}{' twice' if again else ''}")
        self._drop(sequence)
        if again:
            free = world.look().free
            world.call("free", name)
            if (now := world.look().free) != free:
                world.fail("free_is_final", f"the second free() changed the number of free blocks from {free} to {now}")
        self._end()

    def do_recompute(self, name: str, chunk: int) -> None:
        """Preempted by recomputation: freed, and admitted again with all its tokens."""
        if (sequence := self._ready(name)) is not None:
            self.do_free(name, False)
            self.do_admit(name, sequence.tokens, chunk, sequence.salt, True, False)

    def _leave(self, name: str, more: list[int], *, capability: str, text: str) -> None:
        world, sequence = self.world, self._ready(name, len(more), capability)
        if sequence is None or sequence.computed == len(sequence.tokens) + len(more):
            return
        sequence.tokens += more
        upto = len(sequence.tokens)
        world.begin(text.format(name, f" + {more}" if more else "", sequence.computed, upto))
        if not self._grow(sequence, upto):
            return
        if capability == "abort":
            self._forward(sequence, upto)
        self._drop(sequence)
        world.counts[capability] += 1
        self._end()

    # Freed while its step runs: the step's KV still lands, before any other write.
    do_abort = partialmethod(_leave, capability="abort", text="free {}{} while it computes [{}, {})")
    # Freed after room was made for a step that never runs.
    do_lose = partialmethod(_leave, capability="lost_step", text="free {}{}, its step [{}, {}) is lost")

    def do_fork(self, name: str, child: str) -> None:
        """Parallel sampling, beams: the child goes on from the parent's computed tokens."""
        world, parent = self.world, self._ready(name, 0, "fork")
        if parent is None or not parent.computed or child in world.live:
            return
        world.begin(f"fork {name} as {child}")
        if not world.call("fork", name, child):
            self._refused()
            return
        contents = list(parent.contents)
        world.live[child] = Sequence(child, parent.tokens[: len(contents)], parent.salt, contents)
        world.counts["fork"] += 1
        self._end(child)
        world.tell(f" -> {blocks(world.after.tables[child])}")

    def do_swap(self, name: str, fail: bool) -> None:
        """Preempted by swapping out; or swapped back in, if it was out."""
        world, sequence = self.world, self.world.live.get(name)
        if not world.can("swap") or sequence is None or sequence.waiting:
            return
        method = "resume" if sequence.swapped else "preempt"
        world.begin(f"{method} {name}")
        if not world.call(method, name, fail=fail):
            self._refused(len(world.before.tables[name]), of_host=not sequence.swapped)
            return
        sequence.swapped = not sequence.swapped
        world.counts["swap"] += not sequence.swapped
        self._end(name)
        world.tell(f" -> {blocks(world.after.tables[name])}")

    def do_persist(self, name: str, fail: bool) -> None:
        """The full blocks are stored."""
        if self._ready(name, 0, "store") is not None:
            self.world.begin(f"persist {name}")
            self.world.call("persist", name, fail=fail)
            self._end()

    def do_settle(self, fail: bool) -> None:
        """A piece of background work ends."""
        world = self.world
        if not world.can("background"):
            return
        world.begin("background work ends")
        world.counts["background"] += 1
        answer: Mapping[str, int] = world.call("settle", fail=fail) or {}
        self._see()
        for name, cached in answer.items():
            sequence = world.live.get(name)
            if sequence is None or not sequence.waiting:
                world.fail("background_ends", f"{name} waits no longer, and did not wait")
                continue
            sequence.waiting = False
            world.tell(f" -> {name} has {cached} tokens cached")
            claims.check_hit(world, sequence, cached)
        self._end(*answer)

    def do_reset(self, end_first: bool) -> None:
        """New weights, with sequences that go on or without any."""
        world = self.world
        if not world.can("reset") or world.version == VERSIONS_MAX:
            return
        if end_first:
            self._end_all()
        world.begin("reset: new weights")
        if world.call("reset"):
            world.version += 1
            world.counts["reset"] += 1
            self._end()
        else:
            self._refused()
            if end_first:
                world.fail("refusal_is_honest", "a reset was refused while no sequence was there")

    def do_restart(self) -> None:
        """The process ends and begins anew, with only the store's content."""
        world = self.world
        if world.can("restart"):
            self._end_all()
            world.begin("restart: what was not stored is lost")
            world.call("restart")
            world.kv.forget()
            world.counts["restart"] += 1
            self._end()

    def _end_all(self) -> None:
        for name in list(self.world.live):
            self.do_free(name, False)

    def do_finish(self) -> None:
        """Every sequence ends; then one sequence can have all blocks."""
        world, full = self.world, self.world.capacity * self.world.size
        self._end_all()
        if world.after.free != world.capacity:
            world.fail("all_come_back", f"{world.after.free} of {world.capacity} blocks are free")
        if world.adapter.window is not None:
            return
        world.begin(f"admit all: {full} new tokens, which need every block")
        if world.call("admit", "all", [2] * full, full, "") is None:
            self._see()
            wanted = f"a sequence of {world.capacity} blocks"
            world.fail("all_come_back", f"{wanted} was refused, and {world.after.free} are free")
            return
        world.live["all"] = Sequence("all", [2] * full, "")
        self._end("all")
        if not world.can("background") or not world.ask("waits", "all"):
            world.call("grow", "all", [2] * full, full)
        self._see()
        if len(set(world.after.tables["all"])) != world.capacity:
            world.fail("all_come_back", f"the sequence got {blocks(world.after.tables['all'])}")
        self.do_free("all", False)
