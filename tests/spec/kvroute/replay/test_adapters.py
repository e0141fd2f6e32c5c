"""What each trainer is given: shape, dtype, layer axis, last row, missing rows. The real packages: real/trainers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from a_store import a_store
from adapters import WHOLE
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from routes_of import expert_rows, made_routes

from cache_manager.errors import InvalidInputError, KVRouteError, RowError
from kvroute import fetch_shard
from kvroute.replay import nemo_rl, prime_rl, skyrl, slime, transformers, verl
from kvroute.replay.rows import ReplayError
from kvroute.routes import Routes, Split, shard_packed, shard_padded

LAYERS, NUM_LAYERS, EXPERTS, TOP_K = (1, 2, 3), 4, 16, 4
ROUTED = list(LAYERS)

# Of one sample of five tokens, prompt and response: how many rows, and their dtype.
MADE = {
    "verl agent loop": (4, "int16"),
    "verl padded": (5, "int16"),
    "verl jagged": (4, "int16"),
    "slime": (4, "int32"),
    "miles": (4, "int32"),
    "prime-rl": (5, "uint8"),
    "NeMo-RL": (5, "int8"),
    "SkyRL": (4, "uint8"),
}


def make(trainer: str, routes: Routes, **missing: str) -> Any:
    return WHOLE[trainer](routes, 3, 2, **missing)


@pytest.mark.parametrize("trainer", sorted(MADE))
def test_a_whole_sample(trainer: str) -> None:
    """Goal: each token's row at its place, on an axis of all layers. Method: ids that encode their position and
    layer."""
    rows, dtype = MADE[trainer]
    got = torch.as_tensor(make(trainer, made_routes(7, 4)))
    assert got.shape == (rows, NUM_LAYERS, TOP_K)
    assert str(got.dtype) == f"torch.{dtype}"
    assert got.is_contiguous() or trainer.startswith("verl")
    assert np.array_equal(got[:4, ROUTED].numpy(), expert_rows(7, np.arange(4), LAYERS, EXPERTS, TOP_K))
    assert int(got[:4, 0].abs().max()) == 0  # the dense layer's place is there


def test_nemo_rl_batches() -> None:
    """Goal: 0..top_k-1 behind the last row read, signed dtypes. Method: every corner."""
    assert nemo_rl.sequence(made_routes(7, 4, holes=(1,)), 6)[5].tolist() == [[0, 1, 2, 3]] * 3
    padded = nemo_rl.batch([made_routes(7, 4), made_routes(8, 6)], [5, 3], 8)
    assert padded.shape == (2, 8, 3, TOP_K)
    assert bool((padded >= 0).all())
    # The second sample was cut to three tokens: its later rows are not replayed on padding.
    assert padded[1, 3:].tolist() == [[[0, 1, 2, 3]] * 3] * 5
    for experts, dtype in [(128, torch.int8), (129, torch.int16), (256, torch.int16), (1 << 15, torch.int16)]:
        assert nemo_rl.sequence(made_routes(7, 1, experts=experts), 2).dtype == dtype
    with pytest.raises(ReplayError, match="width: wanted at least 6"):
        nemo_rl.batch([made_routes(7, 4)], [6], 5)


def test_verl_batches() -> None:
    """Goal: prompts end where responses begin, whatever their lengths. Method: two samples in one padded batch."""
    routes, prompts, responses = [made_routes(1, 4), made_routes(2, 6)], [3, 2], [2, 5]
    got = verl.padded(routes, prompts, responses, 4, 5)
    assert got.shape == (2, 9, NUM_LAYERS, TOP_K)
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        rows = prompt + response - 1
        expected = expert_rows(i + 1, np.arange(rows), LAYERS, EXPERTS, TOP_K)
        assert np.array_equal(got[i, 4 - prompt : 4 - prompt + rows, ROUTED].numpy(), expected)
        assert int(got[i].count_nonzero()) == int(np.count_nonzero(expected))
    for call, message in [
        (lambda: verl.padded(routes, prompts, responses, 2, 5), "sample 0: wanted at most 2 and 5 tokens, got 3 and 2"),
        (
            lambda: verl.padded(routes, prompts, [2], 4, 5),
            "prompts, responses: wanted one number for each of 2.* 2 and 1",
        ),
        (lambda: verl.agent_loop(made_routes(1, 1, experts=40000), 1, 1), "dtype"),
    ]:
        with pytest.raises(KVRouteError, match=message):
            call()


@given(
    tokens=st.lists(st.integers(2, 9), min_size=1, max_size=3),
    tp=st.sampled_from([1, 2]),
    cp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2]),
    sequence_parallel=st.booleans(),
    allgather=st.booleans(),
    multiple=st.sampled_from([1, 4]),
    data=st.data(),
)
def test_lazy_ranks_have_every_row_once(
    tokens: list[int],
    tp: int,
    cp: int,
    pp: int,
    sequence_parallel: bool,
    allgather: bool,
    multiple: int,
    data: st.DataObject,
) -> None:
    """Goal: slime's lazy handles read a rollout store, each rank its own part, in both passes. Method: all ranks of
    random splits together have every row of every routed layer, told by its value, and spread padding beside; the
    layers are asked for in any order."""
    samples = [made_routes(i, n - 1, experts=256) for i, n in enumerate(tokens)]
    store = a_store()
    handles = [store.put(f"r{i}", sample) for i, sample in enumerate(samples)]
    seen: Counter[tuple[int, ...]] = Counter()
    for pp_rank, cp_rank, tp_rank in product(range(pp), range(cp), range(tp)):
        split = slime.split(
            tp, tp_rank, cp, cp_rank, pp=pp, pp_rank=pp_rank,
            sequence_parallel=sequence_parallel, allgather_cp=allgather, data_pad_size_multiplier=multiple,
        )  # fmt: skip
        layers = [layer for layer in split.layers(NUM_LAYERS) if layer in LAYERS]
        asked = data.draw(st.permutations(layers))
        batch = slime.LazyMicroBatch(lambda n, split=split: fetch_shard(store, handles, tokens, split, layers=n), asked)
        forward, backward = (
            [batch.layer(layer).materialize_for_routing_replay(stage) for layer in layers]
            for stage in ("forward", "backward")
        )
        for layer, rows, again in zip(layers, forward, backward, strict=True):
            assert rows.dtype == torch.int64
            assert torch.equal(rows, again)
            if tp_rank == 0 or sequence_parallel:  # without it all tensor-parallel ranks have the same rows
                seen.update((layer, *row) for row in rows.tolist())
    for i, n in enumerate(tokens):
        for index, layer in enumerate(LAYERS):
            for row in expert_rows(i, np.arange(n - 1), LAYERS, 256, TOP_K)[:, index].tolist():
                assert seen[layer, *row] == 1


def test_a_lazy_micro_batch_holds_one_pass_at_a_time() -> None:
    """Goal: rows are read once a pass, not once a layer, and not kept. Method: count reads, interrupt a pass, fail."""
    reads: list[int] = []
    rows = made_routes(1, 8).materialize(8, "moe", "uint8")

    def read(layers: tuple[int, ...]) -> np.ndarray[Any, Any]:
        assert layers == LAYERS
        reads.append(1)
        if len(reads) == 6:
            raise RowError("rollout r1", "routes that are there and whole", "miss")
        return rows

    batch = slime.LazyMicroBatch(read, LAYERS)
    handles = [batch.layer(layer) for layer in LAYERS]
    for _ in range(2):
        for index, handle in enumerate(handles):
            assert np.array_equal(handle.materialize_for_routing_replay("forward").numpy(), rows[:, index])
    assert len(reads) == 2
    handles[0].materialize_for_routing_replay("forward")
    batch.begin_pass("forward")
    handles[0].materialize_for_routing_replay("backward")
    assert len(reads) == 4
    handles[1].materialize_for_routing_replay("forward")  # no call reports that the backward pass was given up
    assert len(reads) == 5
    batch.close()
    batch.close()
    with pytest.raises(RowError, match="rollout r1"):
        handles[0].materialize_for_routing_replay("forward")
    handles[0].materialize_for_routing_replay("forward")  # a failure is not remembered
    with pytest.raises(ReplayError, match=r"layer: wanted one of \[1, 2, 3\], got 0"):
        batch.layer(0)
    with pytest.raises(ReplayError, match=r"rows: wanted shape \(local tokens, 2, top_k\), got \(8, 3, 4\)"):
        slime.LazyMicroBatch(lambda _: rows, (1, 2)).layer(1).materialize_for_routing_replay("forward")
    with pytest.raises(ReplayError, match=r"layers: wanted each layer once, got \(1, 1\)"):
        slime.LazyMicroBatch(lambda _: rows, (1, 1))


SAMPLE, WHOLE_BATCH = made_routes(1, 4), Split()


def stored() -> tuple[Any, list[Any], list[int], Split]:
    store = a_store()
    return store, [store.put("r", SAMPLE)], [5], WHOLE_BATCH


REFUSED: list[tuple[str, Any, list[Any]]] = [
    ("missing", lambda w: SAMPLE.materialize(4, missing=w), ["zeros", "Error", None, ["zero"]]),
    ("layers", lambda w: SAMPLE.materialize(4, w), ["al", [9], [-1], [1, 1], [1.0]]),
    ("ep", lambda w: SAMPLE.materialize(4, ep=w), [0, -2, 3, 2.0, True]),
    ("rows", lambda w: SAMPLE.materialize(w), [-1, 2.0, "4", True]),
    ("dtype", lambda w: SAMPLE.materialize(4, dtype=w), ["float32", "bool"]),
    ("dtype", lambda w: SAMPLE.materialize(4, dtype="uint8", missing=w), ["minus1"]),
    ("missing", lambda w: shard_packed([SAMPLE], [5], WHOLE_BATCH, missing=w), ["zeros", ["zero"], {}]),
    ("pad", lambda w: shard_packed([SAMPLE], [5], WHOLE_BATCH, pad=w), ["error", "arrange", ["zero"]]),
    ("ep", lambda w: shard_packed([SAMPLE], [5], WHOLE_BATCH, ep=w), [[1], 3]),
    ("layers", lambda w: shard_packed([SAMPLE], [5], WHOLE_BATCH, w), [[[1]], [9]]),
    ("layers", lambda w: fetch_shard(*stored(), layers=w), [(0, 1), (3, 4)]),
    ("tokens of sequence 0", lambda w: shard_packed([SAMPLE], [w], WHOLE_BATCH), [-1, 5.0, "5"]),
    ("tokens of sequence 0", lambda w: shard_padded([SAMPLE], [w], WHOLE_BATCH, width=8), [-1, 5.0]),
    ("width", lambda w: shard_padded([SAMPLE], [5], WHOLE_BATCH, width=w), [-1, 8.0]),
    ("side", lambda w: shard_padded([SAMPLE], [5], WHOLE_BATCH, width=8, side=w), ["rigth", None]),
    ("order", lambda w: shard_padded([SAMPLE], [5], WHOLE_BATCH, width=8, order=w), ["token"]),
    ("tp", lambda w: Split(tp=w), [0, -1, 2.0, True, "2"]),
    ("cp_rank", lambda w: Split(cp=2, cp_rank=w), [2, -1, 1.0, None]),
    ("sp", lambda w: Split(sp=w), ["no", 1]),
    ("layout", lambda w: Split(layout=w), ["ring", "Zigzag"]),
    ("align", lambda w: Split(align=w), [0, -4, 2.5]),
    ("prompt", lambda w: verl.agent_loop(SAMPLE, w, 2), [-1, 3.0, "3"]),
    ("response", lambda w: verl.agent_loop(SAMPLE, 8, w), [-3, True]),
    ("missing", lambda w: verl.agent_loop(SAMPLE, 3, 2, missing=w), ["sperad"]),
    ("tokens", lambda w: verl.agent_loop(SAMPLE, 0, w), [0]),
    ("prompts", lambda w: verl.padded([SAMPLE], [w], [2], 4, 4), [-1]),
    ("responses", lambda w: verl.padded([SAMPLE], [8], [w], 8, 4), [-3]),
    ("prompt_length", lambda w: verl.padded([SAMPLE], [3], [2], w, 4), [-1, 3.0]),
    ("response_length", lambda w: verl.padded([SAMPLE], [3], [2], 4, w), [-1]),
    ("tokens", lambda w: verl.jagged([SAMPLE], [w]), [-1, 0, 5.0]),
    ("tokens", lambda w: verl.replay_mask([SAMPLE], [w]), [-1, 0, 5.0]),
    ("holes", lambda w: skyrl.rollout_expert_indices([SAMPLE], [5], holes=w), ["cutt", None]),
    ("tokens", lambda w: skyrl.rollout_expert_indices([SAMPLE], [w]), [-1, 0]),
    ("held", lambda w: skyrl.delta(SAMPLE, w, 5), [-1, 5, 1.0]),
    ("tokens", lambda w: nemo_rl.sequence(SAMPLE, w), [-1, 0, 5.0]),
    ("layers", lambda w: nemo_rl.sequence(SAMPLE, 5, layers=w), ["routed"]),
    ("width", lambda w: nemo_rl.batch([SAMPLE], [5], w), [-1, 4, 8.0]),
    ("tokens", lambda w: prime_rl.routed_experts(SAMPLE, w), [-1, 0]),
    ("missing", lambda w: prime_rl.routed_experts(SAMPLE, 5, missing=w), ["zeros"]),
    ("tokens", lambda w: slime.sample(SAMPLE, w), [-1, 0]),
    ("missing", lambda w: slime.miles_sample(SAMPLE, 5, missing=w), ["-1"]),
    ("tail_align", lambda w: slime.split(data_pad_size_multiplier=w), [0, -1]),
    ("mask", lambda w: transformers.padded([SAMPLE], w), [[[1, 2, 0]], [1, 0], [[0.5]], [[1], [1]]]),
    ("mask of sample 0", lambda w: transformers.padded([SAMPLE] * 2, w), [[[1, 0, 1], [1, 1, 1]]]),
    (
        "mask of sample 1",
        lambda w: transformers.padded([SAMPLE] * 2, w),
        [[[1, 1, 0], [0, 1, 1]], [[1, 1, 1], [0, 1, 0]]],
    ),
    ("tokens of sequence 0", lambda w: transformers.packed([SAMPLE], [w]), [-1]),
]


@pytest.mark.parametrize(("field", "call", "wrong"), REFUSED, ids=[f"{i} {each[0]}" for i, each in enumerate(REFUSED)])
def test_words_and_counts_that_cannot_be_are_refused_by_field(field: str, call: Any, wrong: list[Any]) -> None:
    """Goal: a misspelled word or an impossible count is never silently accepted. Method: each, in each call."""
    for word in wrong:
        with pytest.raises(InvalidInputError) as refused:
            call(word)
        assert refused.value.field == field
        assert str(refused.value).startswith(f"{field}: wanted ")


@pytest.mark.parametrize("delta", [verl.delta, skyrl.delta])
def test_a_turn_is_made_of_the_rows_that_it_has(delta: Callable[..., NDArray[Any]]) -> None:
    """Goal: an answer that omits the rows that the trainer holds is used as a delta. Method: routes from the held rows
    on, beside the whole; with a later start the first row that is not there is named."""
    whole = delta(SAMPLE, 2, 5)
    assert np.array_equal(delta(SAMPLE.slice(2, 4), 2, 5), whole)
    assert np.array_equal(whole, delta(SAMPLE, 0, 5)[2:])
    with pytest.raises(RowError, match="row 2: wanted a row for each of the positions"):
        delta(SAMPLE.slice(3, 4), 2, 5)
