"""The state of a model of an engine's blocks: dictionaries of rows, one a life, and what is in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from canary import canary_rows
from gate import Gate, GatedStore
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine
from watched_region import watch_rows

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import BlockBusyError, SlotError
from cache_manager.feed import BlockFeed
from cache_manager.jobs import JobLimits
from cache_manager.keys import BlockKey, Namespace
from cache_manager.publish import rows_by_spec
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.storage import open_store

DEVICE, HOST, TOKENS, STEPS_MAX, JOBS_MAX = 4, 3, 3, 3, 3
SPEC = AuxBlockDataSpec("routing", (2, 3), "uint8", TOKENS)
SIZES = {"device": DEVICE, "host": HOST}
END = DEVICE * TOKENS
SOME = st.lists(st.integers(0, DEVICE - 1), min_size=1, max_size=3, unique=True)
BLOCK = st.integers(0, DEVICE - 1)
MEANWHILE = ("renew", "reset", "fill", "step", "abort", "device", "refuse", "forget", "leave", "restore")
TIERS = {"copy": ("device", "device"), "swap_out": ("device", "host"), "swap_in": ("host", "device")}


def slots_of(block: int) -> list[int]:
    return list(range(block * TOKENS, (block + 1) * TOKENS))


@dataclass(eq=False)
class Life:
    """What was written for one life of a block, or since everything in it was forgotten."""

    rows: dict[int, bytes] = field(default_factory=dict)
    computed: bool = False  # its KV was named: nothing is restored beside it


@dataclass(eq=False)
class ModelStep:
    real: object
    slots: list[int]  # as they were given, mistakes included
    lives: dict[int, Life]  # by slot: those that the step may write
    began: dict[int, int]  # by block: its generation, where the step may write it
    rows: dict[int, bytes] = field(default_factory=dict)  # what was copied, or what the device writes
    in_place: bool = False
    written: bool = False

    @property
    def reach(self) -> set[int]:
        """Where a device writes that was given the slots: also where the step does not."""
        return {slot for slot in self.slots if 0 <= slot < END}


@dataclass(eq=False)
class ModelJob:
    real: object
    key: BlockKey
    block: int
    life: Life | None  # of a restore
    rows: dict[int, bytes] | None = None
    origin: int = 0  # of a persist: under which the rows left


class BlocksModel(RuleBasedStateMachine):
    """An engine's blocks, the feed of its scheduler, and what is known of both."""

    memory = "heap"

    def __init__(self) -> None:
        super().__init__()
        self.store = GatedStore(open_store("memory:?capacity=1MiB"))
        self.store.gate = self.gate = Gate()
        self.engine = AuxBlocks(
            [SPEC],
            blocks=DEVICE,
            host_blocks=HOST,
            namespace=Namespace("m", 0),
            store=self.store,
            memory=self.memory,
            steps_max=STEPS_MAX,
            jobs=JobLimits(threads_max=1, jobs_max=JOBS_MAX),
        )
        for tier in SIZES:
            watch_rows(self.engine.region(tier), self.copied)
        self.feed = BlockFeed(blocks=DEVICE)
        self.last = b""
        self.lost = False  # a batch, and no later one has come
        self.known = [0] * DEVICE  # generations, as the worker knows them
        self.lives = {tier: [Life() for _ in range(n)] for tier, n in SIZES.items()}
        self.given: dict[str, set[int]] = {"device": set(), "host": set()}
        self.filling: set[int] = set()  # device blocks that bytes are being copied into
        self.meanwhile: Callable[[], None] | None = None  # happens once, when a move has copied bytes of a block
        self.steps: list[ModelStep] = []
        self.device: deque[ModelStep] = deque()  # in-place steps whose rows the device has not written
        self.jobs: list[ModelJob] = []
        self.stored: dict[BlockKey, tuple[int, dict[int, bytes]]] = {}  # origin and rows
        self.left: dict[int, dict[int, bytes]] = {}  # by origin: what had been written when it left, for ever
        self.version = self.serial = 0

    def copied(self) -> None:
        """Bytes have been copied into a block, under no lock if by a move."""
        happens, self.meanwhile = self.meanwhile, None
        if happens is not None:
            happens()

    def teardown(self) -> None:
        for tier in SIZES:
            watch_rows(self.engine.region(tier), None)
        self.engine.close()

    def forget(self, tier: str, block: int) -> None:
        self.lives[tier][block] = Life()

    def forget_all(self) -> None:
        for tier, lives in self.lives.items():
            for block in range(len(lives)):
                self.forget(tier, block)

    def deliver(self) -> None:
        """The scheduler's next batch comes."""
        self.last = self.feed.take()
        self.find_gap()
        self.engine.apply(self.last)

    def find_gap(self) -> None:
        """A batch comes: where one was lost before it, nothing is known of any block, nor in which life it is."""
        if self.lost:
            self.lost = False
            self.known = [0] * DEVICE
            self.given["device"].clear()
            self.forget_all()

    def learn(self, blocks: list[int]) -> None:
        """The worker learns that blocks were given out; it refuses those into which bytes are being copied."""
        for b in set(blocks) - self.filling:
            self.known[b] = int(self.feed.generations[b])
            self.given["device"].add(b)
            self.forget("device", b)

    def origins(self, tier: str) -> list[int]:
        """Of every block, without handing any out."""
        return self.engine._tiers[tier].origins.names.tolist()

    def leave(self, tier: str, block: int) -> int:
        """What the block holds is known elsewhere under its origin, from now on."""
        origin, rows = self.origins(tier)[block], self.lives[tier][block].rows
        if origin:
            assert rows.items() <= self.left.setdefault(origin, dict(rows)).items(), "two computations under one origin"
        return origin

    def fresh_rows(self, slots: list[int]) -> dict[int, bytes]:
        self.serial += 1
        rows = canary_rows(SPEC, [(self.serial, slot) for slot in slots])
        return {slot: row.tobytes() for slot, row in zip(slots, rows, strict=True)}

    def key(self, n: int) -> BlockKey:
        return self.engine.keys.key(None, [n])

    def filled_by(self, step: ModelStep, block: int) -> bool:
        """Whether the step keeps others from filling the block: its device may write it, or it began in this life."""
        if step.in_place:
            return any(slot // TOKENS == block for slot in step.reach)
        return step.began.get(block) == self.known[block]

    # ---------------------------------------------------------------- steps

    def the_device_writes(self) -> None:
        """Whatever happened to the blocks: the pass does not notice it."""
        (rows,) = rows_by_spec(self.engine.region("device"))
        for slot, row in self.device.popleft().rows.items():
            rows[slot // TOKENS, slot % TOKENS] = np.frombuffer(row, np.uint8)

    def begin(
        self,
        slots: list[int],
        *,
        in_place: bool = False,
        whole: bool = True,
        call: Callable[[np.ndarray], object] | None = None,
    ) -> ModelStep | None:
        """Unless it is another ``call`` that begins a step, it is ``begin_step``."""
        refused = len(self.steps) == STEPS_MAX or not whole
        touched = {s: self.lives["device"][s // TOKENS] for s in slots if 0 <= s < END}
        touched = {slot: life for slot, life in touched.items() if slot // TOKENS in self.given["device"]}
        writable = {slot for slot in touched if slot // TOKENS not in self.filling}
        lives = {slot: touched[slot] for slot in writable if slots.count(slot) == 1 and not refused}
        dropped = len(slots) if refused else sum(slot != -1 for slot in slots) - len(lives)
        before = self.engine.counters.bad_writes_dropped
        real = None
        try:
            at = np.array(slots, np.int64 if whole else np.float32)
            real = call(at) if call else self.engine.begin_step(at, in_place=in_place)
        except (BlockBusyError, SlotError):
            assert refused
        assert self.engine.counters.bad_writes_dropped == before + dropped, "a step writes what it may, and no other"
        for slot, life in touched.items():  # a pass writes its KV, whatever becomes of its rows
            for step in self.steps:
                step.lives.pop(slot, None)
            life.rows.pop(slot % TOKENS, None)
            life.computed = True
        for block in {slot // TOKENS for slot in touched if slot not in lives}:
            self.forget("device", block)  # copies into these blocks are lost, too
            self.lives["device"][block].computed = True
        lives = {slot: self.lives["device"][slot // TOKENS] for slot in lives}
        if real is None or (call and refused):
            return None
        began = {slot // TOKENS: self.known[slot // TOKENS] for slot in lives}
        step = ModelStep(real, slots, lives, began, in_place=in_place)
        self.steps.append(step)
        if in_place:
            step.rows, step.written = self.fresh_rows(sorted(step.reach)), True
            self.device.append(step)
        return step

    def room(self, steps: int = 1) -> None:
        """There are so many steps less than there may be."""
        while len(self.steps) > STEPS_MAX - steps:
            self.end(self.steps[0], commit=True)

    def fill(self, block: int) -> None:
        """A pass over the whole block, from its beginning to its end."""
        self.room()
        step = self.begin(slots_of(block))
        self.write(step)
        self.end(step, commit=True)

    def write(self, step: ModelStep) -> None:
        """Copy rows into place."""
        self.serial += 1
        rows = canary_rows(SPEC, [(self.serial, n) for n in range(len(step.slots))])
        step.written = True
        step.real.write("routing", rows)
        for earlier in self.steps[: self.steps.index(step)]:
            if earlier.in_place:  # its device may still write over what is copied now
                for slot in earlier.reach:
                    step.lives.pop(slot, None)
        for slot, row in zip(step.slots, rows, strict=True):
            step.rows.setdefault(slot, row.tobytes())

    def end(self, step: ModelStep, *, commit: bool) -> None:
        while step in self.device:
            self.the_device_writes()
        if commit and step.in_place:
            step.real.wrote("routing")
        landed = step.real.commit() if commit else step.real.abort()
        for block, life in step.began.items() if commit else ():
            if self.known[block] == life:  # forgotten meanwhile, it has the KV of this pass all the same
                self.lives["device"][block].computed = True
        self.land(step, landed, set(step.slots) if commit else set())

    def land(self, step: ModelStep, landed: int | None, kept: set[int]) -> None:
        """The step has ended; of its slots those ``kept`` count."""
        earlier = self.steps[: self.steps.index(step)]
        fenced = {slot for each in earlier if each.in_place for slot in each.reach}
        self.steps.remove(step)
        land = {
            slot: life
            for slot, life in step.lives.items()
            if step.written and slot in kept and slot not in fenced and life is self.lives["device"][slot // TOKENS]
        }
        assert (landed or 0) == len(land), "a step lands where no device may still write"
        for slot, life in land.items():
            life.rows[slot % TOKENS] = step.rows[slot]
