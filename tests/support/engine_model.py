"""What a model of an engine's blocks knows: dictionaries of rows, one a life, and what is in flight."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from canary import canary_rows
from gate import Gate, GatedStore
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine

from cache_manager.blocks import AuxBlocks
from cache_manager.feed import BlockFeed
from cache_manager.stored import JobLimits
from cache_manager.keys import BlockKey, Namespace
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.storage import open_store

DEVICE, HOST, TOKENS, STEPS_MAX = 4, 3, 3, 3
SPEC = AuxBlockDataSpec("routing", (2, 3), "uint8", TOKENS)
END = DEVICE * TOKENS
SOME = st.lists(st.integers(0, DEVICE - 1), min_size=1, max_size=3, unique=True)
BLOCK = st.integers(0, DEVICE - 1)
MEANWHILE = (None, "renew", "reset", "fill", "step", "abort", "device", "refuse")
TIERS = {"copy": ("device", "device"), "out": ("device", "host"), "in": ("host", "device")}


def slots_of(block: int) -> list[int]:
    return list(range(block * TOKENS, (block + 1) * TOKENS))


@dataclass(eq=False)
class Life:
    """What was written for one life of a block, or since everything in it was forgotten."""

    rows: dict[int, bytes] = field(default_factory=dict)
    computed: bool = False  # somebody has said what its KV is: nothing is restored beside it


@dataclass(eq=False)
class ModelStep:
    real: object
    slots: list[int]  # as they were given, mistakes included
    lives: dict[int, Life]  # by slot: those that the step may write
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


class EngineModel(RuleBasedStateMachine):
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
            jobs=JobLimits(threads_max=1, jobs_max=3),
        )
        self.feed = BlockFeed(blocks=DEVICE)
        self.last = b""
        self.lost = False  # a batch, and no later one has come
        self.known = [0] * DEVICE  # generations, as the worker knows them
        self.lives = {"device": [Life() for _ in range(DEVICE)], "host": [Life() for _ in range(HOST)]}
        self.given: dict[str, set[int]] = {"device": set(), "host": set()}
        self.steps: list[ModelStep] = []
        self.device: deque[ModelStep] = deque()  # in-place steps whose rows the device has not written
        self.jobs: list[ModelJob] = []
        self.stored: dict[BlockKey, dict[int, bytes]] = {}
        self.version = self.serial = 0

    def forget(self, tier: str, block: int) -> None:
        self.lives[tier][block] = Life()

    def deliver(self) -> None:
        """The scheduler's next batch comes."""
        self.last = self.feed.take()
        if self.lost:
            self.lost = False
            for tier, lives in self.lives.items():
                for block in range(len(lives)):
                    self.forget(tier, block)
        self.engine.apply(self.last)

    def learn(self, blocks: list[int]) -> None:
        for b in blocks:
            self.known[b] = int(self.feed.generations[b])
            self.given["device"].add(b)
            self.forget("device", b)

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
        entry = step.real._entry
        mine = entry.blocks == block
        return bool(mine.any()) and bool(entry.generations[mine] == self.known[block])
