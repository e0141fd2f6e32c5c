"""Rows by pairs: they go where the engine's messages say that its KV goes, in the engine's order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st

import kvroute
from cache_manager.keys import Namespace
from kvroute.connector import Engine, Settings
from kvroute.connector.carriers import ByPairs
from kvroute.connector.carriers.port import NO_PAIRS, Admission, Load, Moves, SchedulerParts
from kvroute.connector.versions import AS_LOADED, Versions
from kvroute.integrations.vllm.offloading import moves_of
from kvroute.routing import routing_spec

BLOCKS, PLACES, TOKENS, EXPERTS = 6, 8, 4, 64


class Host:
    """An engine with places on its host, whose KV is a number for each token, and the rows beside it."""

    def __init__(self) -> None:
        spec = routing_spec(EXPERTS, 2, range(1), num_layers=1, block_tokens=TOKENS)
        engine = Engine(
            Settings.of({"weights": "m"}), spec, Namespace("m", AS_LOADED), BLOCKS, 64, carrier=ByPairs(PLACES)
        )
        self.places = engine.places
        self.feed = kvroute.BlockFeed(engine.places.stop)
        weights = Versions(engine.namespace, None, lambda _: None, named=True)
        parts = SchedulerParts(
            engine.settings,
            engine.limits,
            spec,
            BLOCKS,
            self.feed,
            weights,
            lambda: None,
            lambda *_: [],
            places=engine.places,
        )
        self.side = engine.carrier.scheduler(parts)
        self.side.attach(PLACES)
        self.rows = kvroute.AuxBlocks(
            engine.layout.specs, blocks=engine.places.stop, namespace=engine.namespace, strict=True
        )
        self.kv, self.host = (np.full((n, TOKENS), -1) for n in (BLOCKS, PLACES))
        self.due = NO_PAIRS
        self.next = 0

    def step(self, given: list[int], moves: Moves, computed: list[tuple[int, int]], hits: dict[str, int]) -> None:
        """As vLLM does it: copies to the host that are due, those that cannot wait, copies back, and new tokens at
        ``computed`` (block, offset)."""
        for name, tokens in hits.items():
            self.side.admitted(Admission(SimpleNamespace(request_id=name), [], 0, tokens, False, None))  # type: ignore[arg-type]
        self.side.leave(moves)
        self.feed.renew(given)
        self.side.enter(moves)
        self.rows.apply(self.feed.take())
        for block, place in (*self.due.tolist(), *moves.kept.tolist()):
            self.host[place] = self.kv[block]
        for load in moves.loads:
            for block, place in load.pairs.tolist():
                self.kv[block] = self.host[place]
        slots = np.array([block * TOKENS + offset for block, offset in computed], np.int64)
        self.kv.reshape(-1)[slots] = range(self.next, self.next + len(slots))
        self.next += len(slots)
        self.rows.write_step(slots, {"routing": _row(self.kv.reshape(-1)[slots])})
        self.due = moves.kept_later

    def close(self) -> None:
        self.rows.close()

    def known(self) -> dict[tuple[int, int], bool]:
        """By block and offset whether its row is readable; a row that is has the KV's number."""
        known = dict[tuple[int, int], bool]()
        for block in range(BLOCKS):
            read = self.rows.read("routing", [block], 0, TOKENS)
            for offset in range(TOKENS):
                known[block, offset] = bool(read.valid[offset].all())
                if known[block, offset]:
                    assert (read.values[offset] == _row(self.kv[block, offset : offset + 1])[0]).all()
        return known


def _row(kv: Any) -> Any:
    """``[n, 1, 2]``: two experts, which differ from number to number up to 4,032."""
    kv = np.asarray(kv)
    first = kv % EXPERTS
    return np.stack([first, (first + 1 + kv // EXPERTS % (EXPERTS - 1)) % EXPERTS], 1)[:, None]


BLOCK, PLACE = st.integers(0, BLOCKS - 1), st.integers(0, PLACES - 1)
PAIRS = st.lists(st.tuples(BLOCK, PLACE), max_size=3, unique_by=lambda pair: pair[1])
BACK = st.lists(st.tuples(BLOCK, PLACE), max_size=3, unique_by=lambda pair: pair[0])


def _pairs(of: list[tuple[int, int]]) -> Any:
    return np.array(of, np.int64).reshape(-1, 2)


@examples(200)
@given(
    st.lists(
        st.tuples(
            st.lists(BLOCK, max_size=4, unique=True),
            PAIRS,
            PAIRS,
            BACK,
            st.integers(0, 3 * TOKENS),
            st.sets(st.tuples(BLOCK, st.integers(0, TOKENS - 1)), max_size=8),
        ),
        min_size=2,
        max_size=12,
    )
)
def test_rows_are_of_the_kv_beside_them(steps: list[Any]) -> None:
    """Goal: a readable row is of the KV that lies in its block, whatever is copied when, also of parts of a block.
    Method: any steps of an engine whose KV is a number for each token; KV that stays in a block that was given out is
    still copied. Blocks are only loaded or computed in a life of their own."""
    host = Host()
    lives, kept_places, due = set[int](), set[int](), set[int]()
    for given_out, kept, later, back, hit, computed in steps:
        kept_places |= due
        kept = [pair for pair in kept if pair[0] in lives]
        lives |= set(given_out)
        later = [pair for pair in later if pair[0] in lives]
        kept_places |= {place for _, place in kept}
        due = {place for _, place in later}
        loaded = [(block, place) for block, place in back if block in given_out and place in kept_places]
        moves = Moves(_pairs(kept), _pairs(later), [Load("r", 0, _pairs(loaded))])
        host.step(given_out, moves, sorted(at for at in computed if at[0] in lives), {"r": hit})
        host.known()
        host.rows.assert_consistent()
    host.close()


def test_rows_come_back_whole_and_no_further_than_the_hit() -> None:
    """Goal: all rows of a hit come back, and none behind it. Method: two blocks go to the host with the next step, one
    of which is given out in that step; both come back into others, of which six tokens are a hit."""
    host = Host()
    tokens = [(block, offset) for block in (0, 1) for offset in range(TOKENS)]
    host.step([0, 1], Moves(kept_later=_pairs([(0, 5), (1, 2)])), tokens, {})
    host.step([0], Moves(), [(0, 0)], {})
    host.step([3, 4], Moves(loads=[Load("r", 0, _pairs([(3, 5), (4, 2)]))]), [], {"r": 6})
    known = host.known()
    assert [known[3, i] for i in range(TOKENS)] == [True] * TOKENS
    assert [known[4, i] for i in range(TOKENS)] == [True, True, False, False]
    assert known[0, 0]
    assert not known[0, 1]


def test_a_block_that_the_same_step_gives_out_is_kept_before() -> None:
    """Goal: KV that cannot wait for the next step has its rows. Method: it is kept now, and its block given out."""
    host = Host()
    host.step([0], Moves(), [(0, offset) for offset in range(TOKENS)], {})
    host.step([0], Moves(kept=_pairs([(0, 1)])), [(0, 0)], {})
    host.step([2], Moves(loads=[Load("r", 0, _pairs([(2, 1)]))]), [], {"r": TOKENS})
    assert all(host.known()[2, offset] for offset in range(TOKENS))


def test_workers_with_another_host_are_refused() -> None:
    """Goal: each place that the scheduler names is there. Method: a worker with fewer places; and one with more, as a
    stage of few layers is."""
    with pytest.raises(kvroute.ConfigError, match=r"places on the host.*8 at least, as the scheduler.*7 in a worker"):
        Host().side.attach(7)
    Host().side.attach(9)


# ---------------------------------------------------------------- vLLM's messages


def _scheduler(groups: list[int], size: int) -> Any:
    configs = [SimpleNamespace(group_idx=group) for group in groups]
    return SimpleNamespace(config=SimpleNamespace(kv_group_configs=configs, blocks_per_chunk=size))


def _device(*groups: tuple[int, list[int]]) -> Any:
    """Blocks of each group, with the first one's place among those of the request."""
    return SimpleNamespace(
        block_ids=np.array([block for _, blocks in groups for block in blocks], np.int64),
        group_sizes=[len(blocks) for _, blocks in groups],
        block_indices=[first for first, _ in groups],
    )


def _message(stores: dict[int, Any], loads: dict[int, Any], flushed: set[int] | None = None) -> Any:
    return SimpleNamespace(store_jobs=stores, load_jobs=loads, jobs_to_flush=flushed)


def _chunks(*ids: int) -> Any:
    return SimpleNamespace(block_ids=np.array(ids, np.int64))


def test_chunks_of_several_blocks_in_several_groups() -> None:
    """Goal: each block of the group of rows has its own place in its chunk. Method: vLLM's lists of blocks and chunks
    of two groups, by hand: three blocks a chunk; the second group's first and last chunk are used in part."""
    device = _device((0, [40, 41, 42]), (2, [10, 11, 12, 13, 14]))
    job = SimpleNamespace(req_id="r", src_spec=_chunks(7, 5, 3, 9), dst_spec=device)
    moves = moves_of(_scheduler([1, 4], 3), _message({}, {3: job}), 4)
    (load,) = moves.loads
    assert (load.request_id, load.first) == ("r", 2)
    assert load.pairs.tolist() == [[10, 17], [11, 9], [12, 10], [13, 11], [14, 27]]
    assert moves_of(_scheduler([1, 4], 3), _message({}, {3: job}), 1).loads[0].pairs.tolist() == [
        [40, 21],
        [41, 22],
        [42, 23],
    ]


def test_what_is_flushed_is_kept_at_once() -> None:
    """Goal: copies have vLLM's order. Method: two jobs, of which one is to be over before the step."""
    jobs = {
        name: SimpleNamespace(req_id="r", src_spec=_device((0, [block])), dst_spec=_chunks(name))
        for name, block in ((1, 30), (2, 31))
    }
    moves = moves_of(_scheduler([0], 1), _message(jobs, {}, {2, 9}), 0)
    assert (moves.kept.tolist(), moves.kept_later.tolist(), moves.loads) == ([[31, 2]], [[30, 1]], [])


def test_a_group_that_stays_on_the_device_has_no_copies() -> None:
    """Goal: rows follow their own group. Method: vLLM's offloading keeps another group alone."""
    jobs = {1: SimpleNamespace(req_id="r", src_spec=_device((0, [3])), dst_spec=_chunks(0))}
    assert moves_of(_scheduler([1], 1), _message(jobs, {}), 0) == Moves()
