"""The life of sequences, as an engine's scheduler leads it, with every claim checked after every operation.

An operation that makes no sense now, about a sequence that is not there say, does nothing: a program stays one when
something is taken out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from cache_manager.testing.life import claims
from cache_manager.testing.life.canary import Cell, MoveFailed
from cache_manager.testing.life.invariants import Operation
from cache_manager.testing.life.world import Sequence, World, blocks

VERSIONS_MAX: Final = 3
PAST_MAX: Final = 8


class Life:
    """Plays operations. Their names are the methods ``do_...``, which say what each of them is."""

    def __init__(self, world: World) -> None:
        self.world, self.manager = world, world.manager
        world.kv.watch = lambda kind, pairs: claims.check_copies(world, kind, pairs)

    def play(self, operation: Operation) -> None:
        """One operation. Raises :class:`InvariantBroken` where a claim does not hold."""
        self.world.program.append(operation)
        method: Callable[..., None] = getattr(self, f"do_{operation[0]}")
        method(*operation[1:])

    def close(self) -> None:
        if self.world.failure is None:
            self.world.ask("close")
        else:
            with suppress(Exception):  # which is not what was found first
                self.manager.close()

    # ---------------------------------------------------------------- parts of operations

    def _see(self) -> None:
        self.world.after = self.world.look()

    def _end(self, *touched: str) -> None:
        self._see()
        claims.check_all(self.world, *touched)

    def _refused(self, answer: object, needs: int | None, free: int | None) -> None:
        """The operation was refused, or failed; ``needs`` blocks would have been enough, so many are ``free``."""
        world = self.world
        failed = isinstance(answer, MoveFailed)
        world.tell(" -> the copy failed" if failed else " -> refused")
        world.counts["refusals"] += not failed
        self._see()
        claims.check_unchanged(world)
        if not (failed or world.kv.failed or needs is None or free is None) and needs <= free:
            world.fail("refusal_is_honest", f"{needs} blocks were asked for at most, and {free} are free")

    def _ready(self, name: str, more: int = 0) -> Sequence | None:
        """The sequence, if it runs, and can have ``more`` tokens."""
        world, sequence = self.world, self.world.live.get(name)
        if sequence is None or sequence.swapped or sequence.waiting:
            return None
        return sequence if len(sequence.tokens) + more <= world.capacity * world.size else None

    def _grow(self, sequence: Sequence, upto: int, *, fail: bool = False) -> bool:
        """Have the manager make room for the positions below ``upto``."""
        world, name = self.world, sequence.name
        answer = world.call("grow", name, list(sequence.tokens), upto, fail=fail)
        if answer is not True:
            self._refused(answer, self._needs(sequence, upto), world.after.free - world.adapter.slack)
            return False
        self._see()
        claims.check_fresh(world, name, sequence.computed // world.size)
        return True

    def _needs(self, sequence: Sequence, upto: int) -> int:
        """How many blocks :meth:`BlockManagerAdapter.grow` may want: new ones, and copies of shared ones."""
        world = self.world
        table, holders = world.after.tables[sequence.name], world.holders(world.after)
        shared = sum(len(holders.get(b, ())) > 1 for b in table[sequence.computed // world.size :] if b is not None)
        return max(0, -(-upto // world.size) - len(table)) + shared

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
        fails = ", the store fails" if fail and world.can("failing_moves") and world.can("store") else ""
        world.begin(f"admit {name} {tokens}{f' under salt {salt!r}' if salt else ''}{fails}")
        free = world.after.free - world.adapter.slack
        cached = world.call("admit", name, list(tokens), chunk, salt, fail=fail)
        if cached is None or isinstance(cached, MoveFailed):
            self._refused(cached, -(-len(tokens) // world.size), free)
            return
        sequence = world.live[name] = Sequence(name, list(tokens), salt)
        sequence.waiting = world.can("background") and bool(world.ask("waits", name))
        self._see()
        world.tell(f" -> {blocks(world.after.tables[name])}, {cached} tokens cached")
        claims.check_hit(world, sequence, cached)
        claims.check_fresh(world, name, -(-cached // world.size))
        world.counts["hits"] += cached > 0
        world.counts["salted admissions"] += bool(salt)
        if world.adapter.finds_held and world.can("prefix"):
            claims.check_found(world, sequence, cached)
        if sequence.waiting:
            world.tell(", waits for more")
            self._end(name)
            return
        upto = min(len(tokens), cached + chunk)
        world.tell(f", computes [{cached}, {upto})")
        self._compute(sequence, upto, rows=rows)
        self._end(name)

    def do_step(self, name: str, more: list[int], chunk: int, rows: bool, fail: bool) -> None:
        """The next chunk of a prompt, or tokens that were decoded."""
        world, sequence = self.world, self._ready(name, len(more))
        if sequence is None or sequence.computed == len(sequence.tokens) + len(more):
            return
        upto = min(len(sequence.tokens) + len(more), sequence.computed + chunk)
        fails = ", a copy fails" if fail and world.can("failing_moves") else ""
        world.begin(f"step {name}{f' + {more}' if more else ''} computes [{sequence.computed}, {upto}){fails}")
        sequence.tokens += more
        if self._grow(sequence, upto, fail=fail):
            self._compute(sequence, upto, rows=rows)
            self._end(name)

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
        upto = {sequence.name: sequence.computed + 1 for sequence in ready}
        given = {sequence.name: sequence.tokens[: upto[sequence.name]] for sequence in ready}
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
            self._forward(sequence, upto[sequence.name], rows=rows)
        world.call("commit_batch", {sequence.name: given[sequence.name] for sequence in fits})
        world.counts["sequences decoded together"] += len(fits) > 1
        self._end(*upto)

    def do_draft(self, name: str, drafts: list[int], accepted: int) -> None:
        """A step that computes draft tokens of which some, the last ones, are rejected."""
        world, sequence = self.world, self._ready(name, len(drafts)) if self.world.can("drafts") else None
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
        world.counts["drafts rejected"] += 1
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
        sequence = self._ready(name)
        if sequence is None:
            return
        self.world.begin(f"free {name}, to compute it again")
        self._drop(sequence)
        self._end()
        self.do_admit(name, sequence.tokens, chunk, sequence.salt, True, False)

    def do_abort(self, name: str, more: list[int]) -> None:
        """Freed while its step runs: the step's KV still lands, before anything else does."""
        self._leave(name, more, "abort", "free {}{} while it computes [{}, {})")

    def do_lose(self, name: str, more: list[int]) -> None:
        """Freed after room was made for a step that never runs."""
        self._leave(name, more, "lost_step", "free {}{}, its step [{}, {}) is lost")

    def _leave(self, name: str, more: list[int], capability: str, text: str) -> None:
        world, sequence = self.world, self._ready(name, len(more)) if self.world.can(capability) else None
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
        world.counts[f"{capability.replace('_', ' ')}s"] += 1
        self._end()

    def do_fork(self, name: str, child: str) -> None:
        """Parallel sampling, beams: the child goes on from what the parent has computed."""
        world, parent = self.world, self._ready(name) if self.world.can("fork") else None
        if parent is None or not parent.computed or child in world.live:
            return
        world.begin(f"fork {name} as {child}")
        answer = world.call("fork", name, child)
        if answer is not True:
            self._refused(answer, None, None)
            return
        contents = list(parent.contents)
        world.live[child] = Sequence(child, parent.tokens[: len(contents)], parent.salt, contents)
        world.counts["forks"] += 1
        self._end(child)
        world.tell(f" -> {blocks(world.after.tables[child])}")

    def do_swap(self, name: str, fail: bool) -> None:
        """Preempted by swapping out; or back again, if it was."""
        world, sequence = self.world, self.world.live.get(name) if self.world.can("swap") else None
        if sequence is None or sequence.waiting:
            return
        method, table = "resume" if sequence.swapped else "preempt", world.after.tables[name]
        world.begin(f"{method} {name}{', a copy fails' if fail and world.can('failing_moves') else ''}")
        answer = world.call(method, name, fail=fail)
        if answer is not True:
            free = world.after.free - world.adapter.slack if sequence.swapped else world.after.host_free
            self._refused(answer, len(table), free)
            return
        sequence.swapped = not sequence.swapped
        world.counts["sequences resumed"] += not sequence.swapped
        self._end(name)
        world.tell(f" -> {blocks(world.after.tables[name])}")

    def do_persist(self, name: str, fail: bool) -> None:
        """The full blocks are stored."""
        world = self.world
        if not world.can("store") or self._ready(name) is None:
            return
        world.begin(f"persist {name}{', the store fails' if fail and world.can('failing_moves') else ''}")
        world.call("persist", name, fail=fail)
        self._end()

    def do_settle(self, fail: bool) -> None:
        """A piece of work in the background comes to its end."""
        world = self.world
        if not world.can("background"):
            return
        world.begin(f"background work ends{', it fails' if fail and world.can('failing_moves') else ''}")
        answer: Mapping[str, int] = world.call("settle", fail=fail)
        if isinstance(answer, MoveFailed):
            answer = {}
        self._see()
        for name, cached in answer.items():
            sequence = world.live.get(name)
            if sequence is None or not sequence.waiting:
                world.fail("background_ends", f"{name} waits no longer, and did not wait")
                continue
            sequence.waiting = False
            world.tell(f" -> {name} has {cached} tokens cached")
            claims.check_hit(world, sequence, cached)
            world.counts["waits ended"] += 1
        self._end(*answer)

    def do_reset(self, end_first: bool) -> None:
        """New weights, with sequences that go on or without any."""
        world = self.world
        if not world.can("reset") or world.version == VERSIONS_MAX:
            return
        if end_first:
            self._end_all()
        world.begin("reset: new weights")
        if world.call("reset") is True:
            world.version += 1
            world.counts["resets"] += 1
            self._end()
        else:
            self._refused(False, None, None)
            if end_first:
                world.fail("refusal_is_honest", "a reset was refused while no sequence was there")

    def do_restart(self) -> None:
        """The process ends and begins anew; what the store has is all that it has."""
        world = self.world
        if world.can("restart"):
            self._end_all()
            world.begin("restart: what was not stored is lost")
            world.call("restart")
            world.kv.forget()
            world.counts["restarts"] += 1
            self._end()

    # ---------------------------------------------------------------- the end of an example

    def _end_all(self) -> None:
        for name in list(self.world.live):
            self.do_free(name, False)

    def do_finish(self) -> None:
        """Every sequence ends; then one sequence can have all blocks."""
        world, full = self.world, self.world.capacity * self.world.size
        self._end_all()
        if world.after.free != world.capacity:
            world.fail("all_come_back", f"{world.after.free} of {world.capacity} blocks are free")
        if world.adapter.slack or world.adapter.window is not None:
            return
        world.begin(f"admit all: {full} new tokens, which need every block")
        cached = world.call("admit", "all", [2] * full, full, "")
        if cached is None:
            self._see()
            world.fail(
                "all_come_back", f"a sequence of {world.capacity} blocks was refused, and {world.after.free} are free"
            )
            return
        world.live["all"] = Sequence("all", [2] * full, "")
        self._end("all")
        if not world.can("background") or not world.ask("waits", "all"):
            world.call("grow", "all", [2] * full, full)
        self._see()
        if len(set(world.after.tables["all"])) != world.capacity:
            world.fail("all_come_back", f"the sequence got {blocks(world.after.tables['all'])}")
        self.do_free("all", False)
