"""A salt for every pass: engines whose KV and rows say which forward pass has made them, over shared stores.

Each token's KV entry and row are the same 16 bytes: a digest of the prefix and the weights, and the pass's own number.
So two passes over one prompt differ, and a row that lies beside the KV of another pass shows itself, as does KV of
another prefix. Run by hand for a larger number: ``python tests/support/salted_passes.py 5000000``.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
from kv import SlotKV
from numpy.typing import NDArray

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import BlockBusyError, StorageError, TransferProcessError
from cache_manager.keys import Namespace
from cache_manager.manager import BlockManager
from cache_manager.ports import StorageBackend
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.storage import open_store
from cache_manager.stored import JobLimits
from cache_manager.testing.faults import FaultyStore

NBYTES = 16
OPERATIONS = {"admit": 18, "compute": 20, "decode": 22, "grow": 6, "fork": 5, "free": 16, "preempt": 4, "resume": 6}
OPERATIONS |= {"persist": 16, "poll": 8, "fault": 2, "rest": 0.15}
"""What is done, and how often."""


class Sequence:
    def __init__(self, tokens: list[int], digests: list[int]) -> None:
        self.tokens, self.digests = tokens, digests

    def extend(self, token: int, version: int) -> None:
        self.tokens.append(token)
        before = self.digests[-1] if self.digests else version + 1
        self.digests.append(hash((before, token, len(self.tokens))) & 0x7FFF_FFFF_FFFF_FFFF)


class SaltedEngine:
    """A block manager, its rows and its KV, over a store that others use too."""

    def __init__(self, world: SaltedWorld, required: list[str]) -> None:
        draw = world.random
        self.world, self.required, self.version = world, required, world.version
        self.blocks, self.host = draw.randint(8, 24), draw.randint(0, 8)
        self.kv = SlotKV(self.blocks, self.host, world.tokens, NBYTES)
        self.rows = AuxBlockDataSpec("salt", (NBYTES,), "uint8", world.tokens)
        self.aux = AuxBlocks(
            [self.rows],
            blocks=self.blocks,
            host_blocks=self.host,
            namespace=Namespace("salted", world.version),
            store=world.store,
            kv=self.kv,
            required=required,
            jobs=JobLimits(threads_max=2, jobs_max=8),
        )
        self.manager = BlockManager(self.aux, sequences_max=64)
        self.sequences: dict[str, Sequence] = {}

    # ---------------------------------------------------------------- what it does

    def admit(self, prompt: list[int], *, wait: bool) -> None:
        name = f"s{self.world.next()}"
        call = self.manager.allocate if wait else self.manager.begin_allocate
        if len(prompt) > self.blocks * self.world.tokens or len(self.sequences) >= 60 or call(name, prompt) is None:
            return
        sequence = Sequence([], [])
        for token in prompt:
            sequence.extend(token, self.version)
        self.sequences[name] = sequence
        self.manager.poll()

    def compute(self, name: str) -> None:
        """A pass over the next part of what has no KV yet; its rows may be lost, in part or whole."""
        sequence, draw = self.sequences[name], self.world.random
        start = self.manager.computed(name)
        if start >= len(sequence.tokens) or not self.manager.append(name, len(sequence.tokens)):
            return  # one that was swapped out came back with the blocks that it had computed
        stop = draw.randint(start + 1, len(sequence.tokens)) if draw.random() < 0.3 else len(sequence.tokens)
        self.passes(self.manager.slots(name, start, stop), sequence.digests[start:stop])
        self.manager.publish(name, sequence.tokens[:stop])

    def passes(self, slots: NDArray[np.int64], digests: list[int]) -> None:
        draw, entries = self.world.random, np.empty((slots.size, 2), np.int64)
        entries[:, 0], entries[:, 1] = digests, self.world.next()
        made = entries.view(np.uint8).reshape(slots.size, NBYTES)
        self.kv.device.reshape(-1, NBYTES)[slots] = made
        fate = draw.random()
        if fate < 0.75:
            self.aux.write_step(slots, {"salt": made})
        elif fate < 0.85:
            self.aux.write_step(slots, {"salt": made}, np.array([draw.random() < 0.8 for _ in digests]))
        elif fate < 0.9:
            self.aux.write_step(slots * 1.0, {"salt": made})
        else:
            step = self.aux.begin_step(slots)
            if draw.random() < 0.5:
                step.write("salt", made)
            if draw.random() < 0.3:
                self.aux.origins(slots // self.world.tokens)  # somebody keeps the KV of the middle of the pass
            step.abort() if draw.random() < 0.5 else step.commit()

    def decode(self) -> None:
        """One token of each sequence that is computed, in one pass."""
        ready = [n for n in self.ready() if self.manager.computed(n) == len(self.sequences[n].tokens)]
        names = self.world.random.sample(ready, min(len(ready), 8))
        numbers = np.array([self.manager.sequence(name) for name in names], np.int64)
        slots = self.manager.append_batch(numbers)
        names = [name for name, slot in zip(names, slots.tolist(), strict=True) if slot >= 0]
        for name in names:
            self.sequences[name].extend(self.world.random.randrange(3), self.version)
        if names:
            self.passes(slots[slots >= 0], [self.sequences[name].digests[-1] for name in names])
            self.manager.publish_batch(numbers[slots >= 0], np.array([self.sequences[n].tokens[-1] for n in names]))

    def ready(self) -> list[str]:
        pending = {s.owner for s in self.manager._jobs.values()}
        return [n for n in self.sequences if not self.manager.is_swapped(n) and n not in pending]

    def fork(self, name: str) -> None:
        child = f"s{self.world.next()}"
        if len(self.sequences) < 60:
            self.manager.fork(name, child)
            done, parent = self.manager.computed(name), self.sequences[name]
            self.sequences[child] = Sequence(parent.tokens[:done], parent.digests[:done])

    def grow(self, name: str) -> None:
        """Room for some further tokens, to be computed."""
        sequence, more = self.sequences[name], self.world.random.randint(1, 2 * self.world.tokens)
        done = self.manager.computed(name)
        if done == len(sequence.tokens) and self.manager.append(name, done + more):
            for _ in range(more):
                sequence.extend(self.world.random.randrange(3), self.version)

    def reset(self) -> None:
        """New weights, or the same ones: requests end first, as engines do."""
        for name in list(self.sequences):
            self.free(name)
        self.manager.reset(weights_version=self.world.version)
        self.version = self.world.version

    def free(self, name: str) -> None:
        self.manager.free(name)
        del self.sequences[name]

    # ---------------------------------------------------------------- what must hold

    def check(self, name: str) -> None:
        """KV is of the prefix and these weights, and each row that is there is of the pass that made the KV."""
        sequence, done = self.sequences[name], self.manager.computed(name)
        tier = self.kv.host if self.manager.is_swapped(name) else self.kv.device
        entries = tier[self.manager.table(name)].reshape(-1, NBYTES)[:done]
        digests = np.ascontiguousarray(entries[:, :8]).view(np.int64)[:, 0]
        assert digests.tolist() == sequence.digests[:done], "KV of another prefix or of other weights"
        rows = self.manager.read("salt", name, 0, done)
        assert (rows.values[rows.valid] == entries[rows.valid]).all(), "rows of another pass than the KV beside them"
        self.world.counts["rows compared"] += int(rows.valid.sum())
        self.world.counts["rows missing"] += int((~rows.valid).sum())

    def close(self) -> None:
        for name in list(self.sequences):
            self.free(name)
        assert self.manager.drain(60.0)
        self.manager.assert_consistent()
        self.aux.assert_consistent()
        assert self.manager.free_device_blocks == self.blocks
        for counted in ("prefix_hit_tokens", "restored_tokens", "evicted_blocks", "preemptions", "cow_blocks"):
            self.world.counts[counted] += getattr(self.manager.counters, counted)
        self.world.counts["store_failures"] += self.manager.counters.store_failures
        self.aux.close()


class SaltedWorld:
    """One to three engines on one store, which forgets, refuses, fails and is opened anew."""

    def __init__(self, seed: int, directory: Path | None) -> None:
        self.random = random.Random(seed)
        self.tokens = self.random.choice((1, 2, 4, 16))
        self.version, self.number = 0, seed << 32
        self.counts: Counter[str] = Counter()
        self.prompts: list[list[int]] = []
        record = 128 + 2 * 64 * -(-NBYTES * self.tokens // 64)
        size = f"{self.random.choice((20, 60, 400)) * record}B"
        self.url = f"memory:?capacity={size}" if directory is None else f"{directory.as_uri()}?quota=1MiB"
        self.store: StorageBackend = FaultyStore(open_store(self.url))
        self.required = [["salt"] if self.random.random() < 0.7 else [] for _ in range(self.random.randint(1, 3))]
        self.engines = [SaltedEngine(self, required) for required in self.required]

    def next(self) -> int:
        self.number += 1
        return self.number

    def prompt(self) -> list[int]:
        """Often one that begins as an earlier one does."""
        if self.prompts and self.random.random() < 0.8:
            old = self.random.choice(self.prompts)
            prompt = old[: self.random.randint(1, len(old))]
        else:
            prompt = []
        prompt = prompt + [self.random.randrange(3) for _ in range(self.random.randint(1, 6 * self.tokens))]
        self.prompts = [*self.prompts[-20:], prompt]
        return prompt

    def operate(self) -> None:
        engine, draw = self.random.choice(self.engines), self.random
        (what,) = draw.choices([*OPERATIONS], [*OPERATIONS.values()])
        ready = engine.ready()
        self.counts["operations"] += 1
        try:
            if what == "admit":
                engine.admit(self.prompt(), wait=draw.random() < 0.5)
            elif what in ("compute", "grow", "fork") and ready:
                getattr(engine, what)(draw.choice(ready))
            elif what == "decode":
                engine.decode()
            elif what == "preempt" and ready:
                engine.manager.preempt(draw.choice(ready))
            elif what == "resume" and (swapped := [n for n in engine.sequences if engine.manager.is_swapped(n)]):
                engine.manager.resume(draw.choice(swapped))
            elif what == "free" and engine.sequences:
                engine.free(draw.choice(list(engine.sequences)))
            elif what == "persist" and ready:
                engine.manager.begin_persist(draw.choice(ready))
            elif what == "poll":
                engine.manager.drain(60.0) if draw.random() < 0.5 else engine.manager.poll()
            elif what == "fault":
                self.fault(engine)
            elif what == "rest":
                self.rest(engine)
        except (StorageError, TransferProcessError, BlockBusyError):
            self.counts["refused"] += 1

    def fault(self, engine: SaltedEngine) -> None:
        store, draw = self.store, self.random
        assert isinstance(store, FaultyStore)
        engine.manager.drain(60.0)  # else a fault would meet a call of another engine
        kind = draw.choice(("copy", "get", "put", "flip"))
        if kind == "copy":
            engine.kv.fail_next = TransferProcessError
            return
        store.fail_get, store.fail_put = kind == "get", kind == "put"
        store.flip_next = draw.randrange(1 << 16) if kind == "flip" else None
        try:
            if ready := engine.ready():
                engine.manager.begin_persist(draw.choice(ready))
            engine.admit(self.prompt(), wait=True)
            engine.manager.drain(60.0)
        finally:
            store.fail_get = store.fail_put = False
            store.flip_next = None

    def rest(self, engine: SaltedEngine) -> None:
        """New weights, a restart, or a store that is opened anew."""
        kind = self.random.choice(("weights", "same weights", "restart", "store"))
        if kind in ("weights", "same weights"):
            self.version += kind == "weights"
            engine.reset()
        elif kind == "restart":
            at = self.engines.index(engine)
            engine.close()
            self.engines[at] = SaltedEngine(self, engine.required)
        elif not self.url.startswith("memory:"):
            for each in self.engines:
                each.close()
            self.store.close()
            self.store = FaultyStore(open_store(self.url))
            self.engines = [SaltedEngine(self, required) for required in self.required]
        self.counts[kind] += 1

    def check(self) -> None:
        for engine in self.engines:
            for name in engine.ready() + [n for n in engine.sequences if engine.manager.is_swapped(n)]:
                engine.check(name)

    def close(self) -> Counter[str]:
        for engine in self.engines:
            engine.close()
        self.store.close()
        return self.counts


def salted_run(seed: int, operations: int, directory: Path | None) -> Counter[str]:
    world = SaltedWorld(seed, directory)
    for _ in range(operations):
        world.operate()
        world.check()
    return world.close()


if __name__ == "__main__":
    wanted, done, seed = int(sys.argv[1]), Counter[str](), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    while done["rows compared"] < wanted:
        with tempfile.TemporaryDirectory() as made:
            done += salted_run(seed, 2000, Path(made) if seed % 3 == 2 else None)
        seed += 1
        print(seed, dict(done), flush=True)
