"""What a model of an engine's blocks knows: dictionaries of rows, one a life, and what is in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from canary import canary_rows
from gate import Gate, GatedStore
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine
from watched_region import watch_rows

from cache_manager.blocks import AuxBlocks
from cache_manager.feed import BlockFeed
from cache_manager.keys import BlockKey, Namespace
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.storage import open_store
from cache_manager.stored import JobLimits

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
    computed: bool = False  # somebody has said what its KV is: nothing is restored beside it


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
        """A batch comes: where one was lost before it, nothing is known of any block."""
        if self.lost:
            self.lost = False
            self.forget_all()

    def learn(self, blocks: list[int]) -> None:
        """The worker has heard that blocks were given out; into which bytes are being copied, it has refused."""
        for b in set(blocks) - self.filling:
            self.known[b] = int(self.feed.generations[b])
            self.given["device"].add(b)
            self.forget("device", b)

    def origins(self, tier: str) -> list[int]:
        """Of every block, without handing any out."""
        return self.engine._tables[tier].origin.tolist()

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
