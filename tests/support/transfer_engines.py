"""The engines of the simulated world of transfers, and what its model knows of them."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from canary import canary_row, canary_rows

from cache_manager.blocks import AuxBlocks
from cache_manager.keys import Namespace
from cache_manager.spec import AuxBlockDataSpec
from transfer.actions import OfferedBlock
from transfer.limits import TransferLimits
from transfer.link import Peer
from transfer.messages import (
    Outcome,
    Part,
    TransferId,
)

TOKENS = 4  # of a block
BLOCKS = 9
ROUTING = AuxBlockDataSpec("routing", (2, 2), "uint8", TOKENS)
VERSION = AuxBlockDataSpec("weights_version", (), "uint32", TOKENS)
SPECS = (ROUTING, VERSION)
KV = AuxBlockDataSpec("kv", (8,), "uint8", TOKENS)
KV_PART = Part("kv", b"kv-of-this-model", KV.block_nbytes, TOKENS)
ROWS, KV_INDEX = 0, 1
LIMITS = TransferLimits(
    lease_s=6.0,
    lease_max_s=40.0,
    retry_s=1.5,
    early_s=1.0,
    resend_s=0.1,
    retries_max=3,
    transfers_max=4,
    peers_max=3,
    remembered_max=6,
    records_nbytes_max=300,
)


@functools.lru_cache(maxsize=1 << 16)
def row_of(spec: AuxBlockDataSpec, author: str, tokens: tuple[int, ...], version: int) -> bytes:
    """The row that ``author`` computed for the last of ``tokens`` under the weights ``version``."""
    return canary_row(spec, author, tokens, version).tobytes()


@dataclass(eq=False)
class Request:
    """What one engine holds for one prompt."""

    owner: str
    tokens: tuple[int, ...]
    version: int
    blocks: list[int]
    keys: list[bytes]
    generations: list[int]
    prompt: int  # tokens
    own: set[int] = field(default_factory=set)  # positions that this engine has computed and committed
    computed: int = 0
    stepping: set[int] = field(default_factory=set)  # positions that a step in flight will write
    again: set[int] = field(default_factory=set)  # prompt positions that this engine computed though it had asked
    pull: TransferId | None = None
    wanted: dict[int, tuple[int, ...]] = field(default_factory=dict)  # index -> parts
    kv_from_prefill: set[int] = field(default_factory=set)
    rows_from_prefill: set[int] = field(default_factory=set)

    wrong_prompt: bool = False
    given_away: bool = False

    @property
    def rows_alone(self) -> set[int]:
        """Blocks whose rows have come, and whose KV has not."""
        return self.rows_from_prefill - self.kv_from_prefill


@dataclass(eq=False)
class Offered:
    """What the model knows of a transfer."""

    id: TransferId
    tokens: tuple[int, ...]
    version: int
    blocks: list[int]
    at_s: float
    whole: bool
    owner: tuple[Peer, bytes] | None = None
    heard_s: float = 0.0
    acked: bool = False
    aborted: bool = False
    reset: bool = False
    rest: list[OfferedBlock] = field(default_factory=list)  # that are still to be added
    open: bool = False
    released: Outcome | None = None


class ClaimError(AssertionError):
    """A claim of docs/invariants.md does not hold."""


def claim(name: str, holds: bool, what: object = "") -> None:
    if not holds:
        raise ClaimError(f"{name}: {what}")


class Engine:
    """Blocks, rows and KV of one process; authors rows under its name."""

    def __init__(self, name: str, version: int) -> None:
        self.name = name
        self.aux = AuxBlocks(SPECS, blocks=BLOCKS, namespace=Namespace("m", version))
        self.kv = np.zeros((BLOCKS, KV.block_nbytes), np.uint8)
        self.version = version
        self.requests: list[Request] = []
        self.held: dict[str, list[int]] = {}  # by owner: not to be given out
        self.count = 0

    @property
    def parts(self) -> tuple[Part, ...]:
        layout = self.aux.layout
        return Part("rows", layout.fingerprint, layout.nbytes, TOKENS), KV_PART

    def keys(self, tokens: tuple[int, ...]) -> list[bytes]:
        keys, parent = [], None
        for at in range(0, len(tokens), TOKENS):
            parent = self.aux.keys.key(parent, tokens[at : at + TOKENS])
            keys.append(parent)
        return keys

    def unheld(self) -> list[int]:
        held = {block for blocks in self.held.values() for block in blocks}
        return [block for block in range(BLOCKS) if block not in held]

    def free(self, owner: str) -> None:
        self.held.pop(owner, None)

    def admit(self, tokens: tuple[int, ...], room: int, dice: random.Random) -> Request | None:
        """Blocks for ``tokens`` and ``room`` more; ``None`` when the pool is full."""
        needed = -(-(len(tokens) + room) // TOKENS)
        if len(unheld := self.unheld()) < needed:
            return None
        self.count += 1
        blocks, owner = dice.sample(unheld, needed), f"req-{self.count}"
        self.held[owner] = blocks
        lives = self.aux.renew(blocks).tolist()
        request = Request(owner, tokens, self.version, blocks, self.keys(tokens), lives, len(tokens))
        self.requests.append(request)
        return request

    def slots(self, request: Request, positions: Iterable[int]) -> list[int]:
        return [request.blocks[p // TOKENS] * TOKENS + p % TOKENS for p in positions]

    def compute(self, request: Request, start: int, stop: int) -> object:
        """Begin the step that computes [start, stop) of the request; the KV is there at once."""
        step = self.aux.begin_step(self.slots(request, range(start, stop)))
        identities = [(self.name, request.tokens[: p + 1], request.version) for p in range(start, stop)]
        for spec in SPECS:
            step.write(spec.name, canary_rows(spec, identities))
        for p in range(start, stop):
            row = row_of(KV, self.name, request.tokens[: p + 1], request.version)
            self.kv[request.blocks[p // TOKENS]].reshape(TOKENS, -1)[p % TOKENS] = np.frombuffer(row, np.uint8)
        return step

    def end(self, request: Request) -> None:
        self.free(request.owner)
        if request in self.requests:
            self.requests.remove(request)

    def churn(self, dice: random.Random) -> None:
        """Other requests use unheld blocks, with their own rows and KV, and end again."""
        for block in self.unheld()[: dice.randint(1, 3)]:
            self.aux.renew([block])
            with self.aux.begin_step(range(block * TOKENS, block * TOKENS + TOKENS)) as step:
                for spec in SPECS:
                    step.write(spec.name, canary_rows(spec, [("churn", self.count, i) for i in range(TOKENS)]))
            self.kv[block] = dice.randrange(256)
            self.count += 1
