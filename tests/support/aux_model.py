"""A model of AuxBlocks that is two dictionaries and knows nothing of the code: owners, steps and moves.

What the store does and what must hold are in ``tests/cache_manager/test_aux_blocks_machine.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from canary import canary_rows
from gate import Gate, GatedStore
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from cache_manager.aux_blocks import AuxBlocks
from cache_manager.errors import BlockStateError
from cache_manager.jobs import JobLimits
from cache_manager.keys import BlockKey, Namespace
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.storage import open_store

OWNERS = ("a", "b", "c")
DEVICE, HOST = 5, 4
JOBS_MAX = 3


@dataclass(eq=False)
class Life:
    rows: dict[tuple[str, int], bytes] = field(default_factory=dict)


@dataclass(eq=False)
class Block:
    life: Life = field(default_factory=Life)
    owners: set[str] = field(default_factory=set)
    free: bool = True
    departures: int = 0
    arriving: bool = False
    steps: int = 0

    @property
    def still(self) -> bool:
        return not self.departures and not self.arriving


@dataclass(eq=False)
class ModelStep:
    real: object
    tokens: list[tuple[int, int] | None]  # (block, offset), None is padding
    lives: list[Life | None]
    superseded: list[bool]
    rows: dict[str, list[bytes]] = field(default_factory=dict)


@dataclass(eq=False)
class ModelMove:
    real: object
    tiers: tuple[str, str]
    pairs: list[tuple[int, int]]
    lives: list[tuple[Life, Life]]
    followers: list[set[str]]  # whose leases go along: those held when the move began


@dataclass(eq=False)
class ModelJob:
    real: object
    key: BlockKey
    version: int
    block: int
    life: Life
    rows: dict[tuple[str, int], bytes] | None  # what is stored, or what the store gave; None: nothing (yet)
    restores: bool
    failed: bool = False
    origin: int = 0  # of what is stored, or was stored before


class AuxModel(RuleBasedStateMachine):
    block_tokens = 3
    memory = "heap"

    def __init__(self) -> None:
        super().__init__()
        self.specs = (
            AuxBlockDataSpec("routing", (2, 3), "uint8", self.block_tokens),
            AuxBlockDataSpec("weights_version", (), "uint32", self.block_tokens),
        )
        self.store = GatedStore(open_store("memory:?capacity=4MiB"))
        self.store.gate = self.gate = Gate()
        self.aux = AuxBlocks(
            self.specs,
            device_blocks=DEVICE,
            host_blocks=HOST,
            namespace=Namespace("m", 0),
            store=self.store,
            required=["routing"],
            memory=self.memory,
            jobs=JobLimits(threads_max=1, jobs_max=JOBS_MAX),
        )
        self.jobs: list[ModelJob] = []
        self.jobs_cancelled = 0
        self.model = {"device": [Block() for _ in range(DEVICE)], "host": [Block() for _ in range(HOST)]}
        self.steps: list[ModelStep] = []
        self.moves: list[ModelMove] = []
        self.stored: dict[BlockKey, dict[tuple[str, int], bytes]] = {}
        self.origins: dict[BlockKey, int] = {}  # of what is stored
        self.keys: dict[int, list[BlockKey]] = {0: []}
        self.version = 0
        self.serial = 0

    # ------------------------------------------------------------ helpers

    def pick(self, data: st.DataObject, tier: str, allowed, most: int = 3) -> list[int]:
        choices = [i for i, b in enumerate(self.model[tier]) if allowed(b)]
        if not choices:
            return []
        return data.draw(st.lists(st.sampled_from(choices), min_size=1, max_size=most, unique=True))

    def end_if_unheld(self, block: Block) -> None:
        if not block.owners and block.still:
            block.free = False

    # ------------------------------------------------------------ owning

    @initialize()
    def start(self) -> None:
        assert self.aux.in_flight == 0

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def allocate(self, data, owner) -> None:
        blocks = self.pick(data, "device", lambda b: not b.owners and b.still)
        self.aux.allocate(blocks, owner)
        for i in blocks:
            block = self.model["device"][i]
            block.life, block.owners, block.free = Life(), {owner}, False

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def allocating_what_is_held_or_moving_changes_nothing(self, data, owner) -> None:
        bad = self.pick(data, "device", lambda b: bool(b.owners) or not b.still, 1)
        good = self.pick(data, "device", lambda b: not b.owners and b.still, 2)
        if bad:
            with pytest.raises(BlockStateError):
                self.aux.allocate(good + bad, owner)

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def share(self, data, owner) -> None:
        blocks = self.pick(data, "device", lambda b: not b.free and not b.arriving)
        self.aux.share(blocks, owner)
        for i in blocks:
            self.model["device"][i].owners.add(owner)

    @rule(owner=st.sampled_from(OWNERS), again=st.booleans())
    def free(self, owner, again) -> None:
        for _ in range(1 + again):
            self.aux.free(owner)
        for tier in self.model.values():
            for block in tier:
                if owner in block.owners:
                    block.owners.discard(owner)
                    self.end_if_unheld(block)
        assert not any(self.aux.holds(owner, i) for i in range(DEVICE)), "released_owners_hold_nothing"

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def free_some(self, data, owner) -> None:
        blocks = self.pick(data, "device", lambda _: True)
        self.aux.free(owner, blocks)
        for i in blocks:
            self.model["device"][i].owners.discard(owner)
            if not self.model["device"][i].free:
                self.end_if_unheld(self.model["device"][i])

    @rule(data=st.data(), tier=st.sampled_from(("device", "host")))
    def evict(self, data, tier) -> None:
        blocks = self.pick(data, tier, lambda b: not b.owners and b.still)
        self.aux.evict(blocks, tier)
        for i in blocks:
            self.model[tier][i].life, self.model[tier][i].free = Life(), True

    # ------------------------------------------------------------ steps

    @rule(data=st.data())
    def begin_step(self, data) -> None:
        held = [i for i, b in enumerate(self.model["device"]) if b.owners and b.still]
        places = [(i, o) for i in held for o in range(self.block_tokens)]
        chosen = data.draw(st.lists(st.sampled_from(places), max_size=6, unique=True)) if places else []
        if held and data.draw(st.booleans()):  # a whole block, as a prefill does
            block = data.draw(st.sampled_from(held))
            chosen = [(block, o) for o in range(self.block_tokens)]
        tokens: list[tuple[int, int] | None] = list(chosen)
        for at in data.draw(st.lists(st.integers(0, len(tokens)), max_size=2)):
            tokens.insert(at, None)
        slots = [-1 if t is None else t[0] * self.block_tokens + t[1] for t in tokens]
        real = self.aux.begin_step(np.array(slots, dtype=np.int64))
        for earlier in self.steps:
            earlier.superseded = [s or t in chosen for s, t in zip(earlier.superseded, earlier.tokens, strict=True)]
        lives = [None if t is None else self.model["device"][t[0]].life for t in tokens]
        step = ModelStep(real, tokens, lives, [False] * len(tokens))
        for i, o in chosen:
            for spec in self.specs:
                self.model["device"][i].life.rows.pop((spec.name, o), None)
        for i in {i for i, _ in chosen}:
            self.model["device"][i].steps += 1
        for spec in self.specs:
            if spec.name == "routing" or data.draw(st.booleans()):
                self.serial += 1
                rows = canary_rows(spec, [(self.serial, n, t) for n, t in enumerate(tokens)])
                real.write(spec.name, rows)
                step.rows[spec.name] = [row.tobytes() for row in rows]
                rows[...] = 0  # the caller may use its memory again
        self.steps.append(step)

    @precondition(lambda self: self.steps)
    @rule(data=st.data(), how=st.sampled_from(("commit", "keep", "abort")))
    def end_step(self, data, how) -> None:
        step = self.steps.pop(data.draw(st.integers(0, len(self.steps) - 1)))
        keep = [True] * len(step.tokens)
        if how == "abort":
            step.real.abort()
        elif how == "keep":
            keep = data.draw(st.lists(st.booleans(), min_size=len(keep), max_size=len(keep)))
            step.real.commit(np.array(keep, dtype=bool))
        else:
            step.real.commit()
        for i in {t[0] for t in step.tokens if t}:
            self.model["device"][i].steps -= 1
        if how == "abort":
            return
        for n, token in enumerate(step.tokens):
            if token is None or not keep[n] or step.superseded[n]:
                continue
            if self.model["device"][token[0]].life is step.lives[n]:
                for name, rows in step.rows.items():
                    step.lives[n].rows[name, token[1]] = rows[n]

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def prefill(self, data, owner) -> None:
        """A block of a new owner with all of its rows, in one go: what can be stored."""
        for i in self.pick(data, "device", lambda b: not b.owners and b.still, 1):
            self.aux.allocate([i], owner)
            block = self.model["device"][i]
            block.life, block.owners, block.free = Life(), {owner}, False
            with self.aux.step(range(i * self.block_tokens, (i + 1) * self.block_tokens)) as step:
                for spec in self.specs:
                    self.serial += 1
                    rows = canary_rows(spec, [(self.serial, o) for o in range(self.block_tokens)])
                    step.write(spec.name, rows)
                    block.life.rows |= {(spec.name, o): row.tobytes() for o, row in enumerate(rows)}

    # ------------------------------------------------------------ moves

    @rule(data=st.data(), kind=st.sampled_from(("out", "in", "copy")), owner=st.sampled_from((None, *OWNERS)))
    def begin_move(self, data, kind, owner) -> None:
        tiers = {"out": ("device", "host"), "in": ("host", "device"), "copy": ("device", "device")}[kind]
        quiet = lambda b: not b.arriving and not b.steps and not b.free  # noqa: E731
        sources = self.pick(data, tiers[0], quiet)
        if kind == "copy":
            room = lambda b: b.still and not b.steps and (not b.owners or not b.life.rows)  # noqa: E731
        else:
            room = lambda b: b.still and not b.steps and not b.owners  # noqa: E731
        targets = self.pick(data, tiers[1], room)
        if tiers[0] == tiers[1]:
            targets = [t for t in targets if t not in sources]
        pairs = list(zip(sources, targets, strict=False))
        if not pairs:
            return
        if kind != "copy" and owner is not None and not all(owner in self.model[tiers[0]][s].owners for s, _ in pairs):
            owner = None
        begin = {"out": self.aux.begin_swap_out, "in": self.aux.begin_swap_in}.get(kind)
        real = begin(pairs, owner) if begin else self.aux.begin_copy(pairs)
        for s, t in pairs:
            self.model[tiers[0]][s].departures += 1
            block = self.model[tiers[1]][t]
            block.arriving = True
            if not block.owners:
                block.life = Life()
        lives = [(self.model[tiers[0]][s].life, self.model[tiers[1]][t].life) for s, t in pairs]
        followers = [
            {o for o in self.model[tiers[0]][s].owners if owner in (None, o)} if kind != "copy" else set()
            for s, _ in pairs
        ]
        self.moves.append(ModelMove(real, tiers, pairs, lives, followers))

    @precondition(lambda self: self.moves)
    @rule(data=st.data(), commit=st.booleans())
    def end_move(self, data, commit) -> None:
        move = self.moves.pop(data.draw(st.integers(0, len(self.moves) - 1)))
        (move.real.commit if commit else move.real.abort)()
        for (s, t), (source_life, target_life), followers in zip(move.pairs, move.lives, move.followers, strict=True):
            source, target = self.model[move.tiers[0]][s], self.model[move.tiers[1]][t]
            if commit:
                if source.life is source_life and target.life is target_life:
                    target.life.rows = dict(source_life.rows)
                going = source.owners & followers
                source.owners -= going
                target.owners |= going
            source.departures -= 1
            target.arriving = False
            self.end_if_unheld(source)
            if not target.owners:
                target.free = not commit
                if not commit:
                    target.life = Life()
            else:
                target.free = False
