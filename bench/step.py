"""What does kvroute add to an engine's step, and what does a swap cost?

Rows of 58 layers x top-8 uint8 (464 bytes a token), blocks of 64 tokens, as DeepSeek-V3 has them. Timed, for decode
steps of 1 to 1024 sequences and a prefill of 8192 tokens, caches warm and cold (64 MiB are written before every call):

* ``table[slots] = rows``: the floor, a bare numpy assignment without bookkeeping;
* begin + commit in place: a device has written the rows into the region;
* begin + write + commit: the rows are copied from the caller's array;
* the manager: room, slots and publication for all running sequences (in a prefill: admission with prefix matching,
  slots and publication), and the same with a step begun, written and committed in between.

Then, warm: a swap of 1000 scattered blocks, in the heap and in SharedMemory, against a bare loop of copies, one numpy
assignment a block, as in FastDeploy's swap of its routing buffer. ``bench.replay`` prints the cost of a finished
request; ``bench.trace`` compares the block manager with vLLM's.

The contestants of one load take turns. Times are the calling thread's own (nothing here waits for another thread), so
that other load on the machine disturbs them less; the fastest and the median count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from bench.harness import Sweep, Timed, asked, nothing, print_race, router_ids, take_turns, write_json
from cache_manager.blocks import AuxBlocks
from cache_manager.keys import Namespace
from cache_manager.manager import BlockManager
from cache_manager.regions import Memory
from kvroute.routing import routing_spec

BLOCK_TOKENS = 64
EXPERTS, LAYERS, TOP_K = 256, 58, 8
SPEC = routing_spec(EXPERTS, TOP_K, range(3, 3 + LAYERS), 3 + LAYERS, BLOCK_TOKENS)
PREFILL = 8192
DECODES = (1, 16, 64, 256, 1024)
TURNS = 8  # of each contestant, which runs its share of the rounds in each
TARGETS_US = {
    ("begin + commit, in place", 256): (25, 150),
    ("begin + write + commit", 256): (60, 200),
    ("manager", 256): (80, None),
}


# ------------------------------------------------------------------------------------------ the calls that are timed


def commit_in_place(aux: AuxBlocks, slots: NDArray[np.int64]) -> None:
    step = aux.begin_step(slots, in_place=True)
    step.wrote(SPEC.name)
    step.commit()


def write_and_commit(aux: AuxBlocks, slots: NDArray[np.int64], rows: NDArray[np.uint8]) -> None:
    step = aux.begin_step(slots)
    step.write(SPEC.name, rows)
    step.commit()


class Running:
    """The running sequences of a block manager, and the calls of a decode step for all of them."""

    def __init__(self, sequences: int, steps_max: int) -> None:
        prompts = BLOCK_TOKENS + np.arange(sequences) % BLOCK_TOKENS
        self.aux = aux_blocks(sequences * (2 + (2 * BLOCK_TOKENS + steps_max) // BLOCK_TOKENS))
        self.manager = BlockManager(self.aux)
        self._tokens = np.random.default_rng(0).integers(0, 1 << 15, (steps_max, sequences))
        self._steps = 0
        for i, n in enumerate(prompts.tolist()):
            prompt = np.random.default_rng(i).integers(0, 1 << 15, n)
            assert self.manager.allocate(f"req-{i}", prompt) is not None
            self.manager.publish(f"req-{i}", prompt)
        self._seqs = np.array([self.manager.sequence(f"req-{i}") for i in range(sequences)])

    def append(self) -> NDArray[np.int64]:
        slots = self.manager.append_batch(self._seqs)
        assert slots.min() >= 0
        return slots

    def publish(self) -> None:
        self.manager.publish_batch(self._seqs, self._tokens[self._steps])
        self._steps += 1


def swapping(memory: Memory, blocks: int) -> tuple[AuxBlocks, Callable[[], object], Callable[[], object]]:
    """Blocks, and a swap of scattered blocks out and in again."""
    rng = np.random.default_rng(0)
    pool = 4 * blocks
    device, host = rng.permutation(pool)[:blocks], rng.permutation(pool)[:blocks]
    aux = aux_blocks(pool, host_blocks=pool, memory=memory)
    aux.renew(device)
    write_and_commit(aux, whole(device), router_ids(blocks * BLOCK_TOKENS, LAYERS, TOP_K, EXPERTS))
    out = np.stack([device, host], axis=1)
    back = np.ascontiguousarray(out[:, ::-1])
    return aux, lambda: aux.swap_out(out), lambda: aux.swap_in(back)


# ------------------------------------------------------------------------------------------ loads


def aux_blocks(blocks: int, **options: Any) -> AuxBlocks:
    return AuxBlocks([SPEC], blocks=blocks, namespace=Namespace("bench", 1), required=(), **options)


def whole(blocks: NDArray[np.int64]) -> NDArray[np.int64]:
    return (blocks[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).reshape(-1)


class FreshSlots:
    """Slots of tokens that are computed for the first time, as in every step; ``next`` is not timed."""

    def __init__(self, tokens: int, prefill: bool) -> None:
        count = tokens // BLOCK_TOKENS if prefill else tokens
        self.aux = aux_blocks(2 * count)
        self.blocks = np.random.default_rng(0).permutation(2 * count)[:count]
        self.slots = np.empty(0, np.int64)
        self._prefill, self._offset = prefill, BLOCK_TOKENS

    def next(self) -> None:
        self._offset += 1
        if self._prefill or self._offset >= BLOCK_TOKENS:
            self.aux.renew(self.blocks)
            self._offset = 0
        self.slots = whole(self.blocks) if self._prefill else self.blocks * BLOCK_TOKENS + self._offset


def step_contestants(tokens: int, prefill: bool, steps_max: int) -> dict[str, Timed]:
    rows = router_ids(tokens, LAYERS, TOP_K, EXPERTS)
    bare, in_place, written = (FreshSlots(tokens, prefill) for _ in range(3))
    table = np.zeros((bare.aux.device_blocks * BLOCK_TOKENS, *SPEC.row_shape), np.uint8)

    def assign() -> None:
        table[bare.slots] = rows

    timed = {
        "table[slots] = rows": Timed(assign, bare.next),
        "begin + commit, in place": Timed(lambda: commit_in_place(in_place.aux, in_place.slots), in_place.next),
        "begin + write + commit": Timed(lambda: write_and_commit(written.aux, written.slots, rows), written.next),
    }
    return timed | (manager_prefill(tokens, rows) if prefill else manager_decode(tokens, rows, steps_max))


def manager_decode(sequences: int, rows: NDArray[np.uint8], steps_max: int) -> dict[str, Timed]:
    alone, stepping = Running(sequences, steps_max), Running(sequences, steps_max)

    def manage() -> None:
        alone.append()
        alone.publish()

    def decode() -> None:
        write_and_commit(stepping.aux, stepping.append(), rows)
        stepping.publish()

    return {"manager": Timed(manage), "manager and step": Timed(decode)}


def manager_prefill(tokens: int, rows: NDArray[np.uint8]) -> dict[str, Timed]:
    return {"manager": _prefill(None, tokens), "manager and step": _prefill(rows, tokens)}


def _prefill(rows: NDArray[np.uint8] | None, tokens: int) -> Timed:
    manager, rng = BlockManager(aux_blocks(4 * tokens // BLOCK_TOKENS)), np.random.default_rng(0)
    prompt = np.zeros(tokens, np.int64)

    def another() -> None:
        manager.free("request")
        prompt[:] = rng.integers(0, 1 << 15, tokens)

    def prefill() -> None:
        assert manager.allocate("request", prompt) is not None
        slots = manager.slots("request", 0, tokens)
        if rows is not None:
            write_and_commit(manager.aux, slots, rows)
        manager.publish("request", prompt)

    return Timed(prefill, another)


# ------------------------------------------------------------------------------------------ tables


def race(size: int, prefill: bool, cold: bool, rounds: int) -> dict[str, Timed]:
    """All contestants of one load, in turns."""
    share, between = max(1, rounds // TURNS), Sweep() if cold else nothing
    timed = step_contestants(size, prefill, TURNS * share)
    for _ in range(TURNS):
        for each in timed.values():  # one after the other: a warm call follows another of its kind
            take_turns(share, [each], between)
    return timed


def print_steps(decodes: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    found = []
    for cold in (False, True):
        for size, prefill in [*((n, False) for n in decodes), *((PREFILL, True) for _ in decodes[:1])]:
            timed = race(size, prefill, cold, max(TURNS, rounds // 5) if cold else rounds)
            load = f"{'prefill' if prefill else 'decode'} of {size}, caches {'cold' if cold else 'warm'}"
            wanted = {name: TARGETS_US.get((name, size), (None, None))[cold] for name in timed}
            targets = {name: f"{us} us" for name, us in wanted.items() if us and not prefill}
            found += print_race(load, timed, targets=targets)
    return found


def print_moves(rounds: int, blocks: int) -> list[dict[str, Any]]:
    """Time and print the swap."""
    found = []
    for memory in get_args(Memory):
        aux, swap_out, swap_in = swapping(memory, blocks)
        scattered = np.random.default_rng(1).permutation(4 * blocks)[: 2 * blocks].reshape(2, -1).tolist()

        def one_by_one(aux: AuxBlocks = aux, scattered: Sequence[Sequence[int]] = scattered) -> None:
            device, host = aux.region("device").rows, aux.region("host").rows
            for s, t in zip(*scattered, strict=True):
                host[t] = device[s]

        swaps = {
            "one assignment a block": Timed(one_by_one),
            "swap_out": Timed(swap_out),
            "swap_in": Timed(swap_in),
        }
        take_turns(rounds, swaps.values())
        aux.close()
        title, nbytes = f"a swap of {blocks} blocks, {memory}", blocks * SPEC.block_nbytes
        found += print_race(title, swaps, nbytes=nbytes, targets={"swap_out": "x 1.15", "swap_in": "x 1.15"})
    return found


def main() -> None:
    args = asked(
        *(__doc__, 200, "40 rounds: noisier"),
        blocks=(1000, "of a swap"),
        sequences=(list(DECODES), "sizes of decode steps; none: swaps only"),
    )
    rounds = min(40, args.rounds) if args.quick else args.rounds
    found = print_steps(args.sequences, rounds)
    found += print_moves(max(1, rounds // 5), args.blocks)
    write_json(args.json, rows=found)


if __name__ == "__main__":
    main()
