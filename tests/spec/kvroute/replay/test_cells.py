"""Every adapter, for routes that lack rows, layers of rows, or layers: each cell is right, or marked as missing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from a_store import a_store
from adapters import WHOLE
from hypothesis import assume, given
from hypothesis import strategies as st
from sample_routes import SHAPES, Cells, Shape, cells_of, cellwise

from cache_manager.errors import KVRouteError, RowError
from kvroute import fetch_shard, open_rollouts
from kvroute.replay import nemo_rl, skyrl, slime, transformers, verl
from kvroute.replay.rows import ReplayError
from kvroute.routes import Routes, Split

SMALL = SHAPES[1:4]  # all routed, dense first, every other one; ids that each trainer's dtype holds
PROMPT = 3

Word = Callable[[list[int], int], bool]
"""Whether some ids, of so many experts, are how a trainer spells what is missing."""


def minus_one(ids: list[int], _experts: int) -> bool:
    return set(ids) == {-1}


def distinct(ids: list[int], experts: int) -> bool:
    return len(set(ids)) == len(ids) and all(0 <= each < experts for each in ids)


def never(_ids: list[int], _experts: int) -> bool:
    return False


def judge(made: Any, shape: Shape, known: Cells, layers: tuple[int, ...], rows: int, word: Word) -> None:
    """Each of the first ``rows`` rows of ``made`` ``[>= rows, layers, top_k]``, cell by cell, by a list of its own."""
    for position, row in enumerate(np.asarray(made)[:rows].tolist()):
        some = any((position, layer) in known for layer in shape.layer_ids)
        for layer, ids in zip(layers, row, strict=True):
            if (position, layer) in known:
                assert ids == known[position, layer], f"position {position} layer {layer}"
            elif layer in shape.layer_ids or not some:
                assert word(ids, shape.num_experts), f"position {position} layer {layer}: {ids}"
            else:
                assert set(ids) == {0}, f"position {position} dense layer {layer}: {ids}"


def first_gap(shape: Shape, known: Cells, rows: int) -> str | None:
    """How an error names the first thing that is missing in the rows ``[0, rows)``."""
    for position in range(rows):
        lost = [layer for layer in shape.layer_ids if (position, layer) not in known]
        if len(lost) == len(shape.layer_ids):
            return f"row {position}"
        if lost:
            return f"row {position} layer {lost[0]}"
    return None


@st.composite
def samples(draw: st.DrawFn) -> tuple[Shape, Routes, int]:
    """A model, the routes of a sample, and how many tokens it has; mostly as many as there are rows, and one."""
    shape = draw(st.sampled_from(SMALL))
    routes = draw(cellwise(shape, rows_max=9, start=draw(st.sampled_from([0, 0, 0, 2]))))
    return shape, routes, max(PROMPT + 1, routes.stop + 1 + draw(st.sampled_from([0, 0, 0, -2, 1])))


@pytest.mark.parametrize("trainer", sorted(set(WHOLE) - {"NeMo-RL", "SkyRL"}))
@given(samples())
def test_a_trainer_without_a_word_is_given_all_or_an_error(trainer: str, sample: tuple[Shape, Routes, int]) -> None:
    """Goal: no zeros but a dense layer's. Method: the default refuses by position and layer, and only what is missing;
    spelled, every missing cell is distinct experts."""
    shape, routes, tokens = sample
    known, every = cells_of(shape, routes), tuple(range(shape.num_layers))
    make = partial(WHOLE[trainer], routes, PROMPT, tokens - PROMPT)
    if (gap := first_gap(shape, known, tokens - 1)) is None:
        judge(make(), shape, known, every, tokens - 1, never)
    else:
        with pytest.raises(RowError, match=f"^(sequence 0 )?{gap}: wanted a row"):
            make()
    judge(make(missing="spread"), shape, known, every, tokens - 1, distinct)


@given(samples())
def test_verl_leaves_rows_that_lack_a_layer_to_the_router(sample: tuple[Shape, Routes, int]) -> None:
    """Goal: one bit a token is true only where each layer's row is the rollout's. Method: the mask, by walking."""
    shape, routes, tokens = sample
    known = cells_of(shape, routes)
    mask = verl.replay_mask([routes], [tokens]).unbind()[0].tolist()
    whole = [all((position, layer) in known for layer in shape.layer_ids) for position in range(tokens - 1)]
    assert mask == [*whole, False]


@given(samples())
def test_skyrl_is_given_the_prefix_of_whole_rows(sample: tuple[Shape, Routes, int]) -> None:
    """Goal: a row that lacks a layer ends the prefix. Method: cut, refused, and refused at position 0."""
    shape, routes, tokens = sample
    known = cells_of(shape, routes)
    whole = [all((position, layer) in known for layer in shape.layer_ids) for position in range(tokens - 1)]
    end = whole.index(False) if False in whole else tokens - 1
    behind = [p for p, _ in known if end < p < tokens - 1]
    if not end:
        with pytest.raises(ReplayError, match="sample 0: wanted a row at position 0"):
            skyrl.rollout_expert_indices([routes], [tokens], holes="cut")
        return
    (made,) = skyrl.rollout_expert_indices([routes], [tokens], holes="cut")
    assert len(made) == end
    judge(made, shape, known, tuple(range(shape.num_layers)), end, never)
    if behind:
        with pytest.raises(ReplayError, match=f"no row behind position {end}, which has no.*got one at {min(behind)}"):
            skyrl.rollout_expert_indices([routes], [tokens])
    else:
        assert np.array_equal(skyrl.rollout_expert_indices([routes], [tokens])[0], made)


@given(samples())
def test_the_router_is_asked_where_a_layer_is_missing(sample: tuple[Shape, Routes, int]) -> None:
    """Goal: NeMo-RL and transformers have a word for each cell. Method: -1 where nothing is known, and nowhere else."""
    shape, routes, tokens = sample
    known, every = cells_of(shape, routes), tuple(range(shape.num_layers))
    rows = tokens - 1
    judge(nemo_rl.sequence(routes, tokens, layers="all"), shape, known, every, rows, minus_one)
    judge(nemo_rl.sequence(routes, tokens), shape, known, shape.layer_ids, rows, minus_one)
    judge(transformers.packed([routes], [tokens]), shape, known, shape.layer_ids, rows, minus_one)
    for left in (0, 2):
        mask = torch.arange(tokens + left)[None] >= left
        judge(transformers.padded([routes], mask)[0, left:], shape, known, shape.layer_ids, rows, minus_one)


@given(samples(), st.sampled_from(["error", "spread"]), st.data())
def test_stores_and_shards_give_no_missing_layer_away(
    sample: tuple[Shape, Routes, int], missing: Any, data: st.DataObject
) -> None:
    """Goal: a rank reads its layers, and layers that the rollout lacks are missing for it. Method: a stage of the
    pipeline, or layers in an order of the caller's, by way of a store that is asked for these layers only."""
    shape, routes, tokens = sample
    known, store = cells_of(shape, routes), a_store()
    handle = store.put("r", routes)
    rank = data.draw(st.integers(0, 1)) if shape.num_layers % 2 == 0 else 0
    split = Split(pp=2, pp_rank=rank)
    stage = tuple(layer for layer in split.layers(shape.num_layers) if layer in shape.layer_ids)
    chosen = data.draw(st.permutations(shape.layer_ids))[: data.draw(st.integers(1, len(shape.layer_ids)))]
    assume(stage)
    for layers, fetch in (
        (stage, partial(fetch_shard, store, [handle], [tokens], split, missing=missing)),
        (tuple(chosen), partial(fetch_shard, store, [handle], [tokens], Split(), missing=missing, layers=chosen)),
    ):
        there = {at: ids for at, ids in known.items() if at[1] in layers}
        lost = [p for p in range(tokens - 1) if any((p, layer) not in there for layer in layers)]
        if lost and missing == "error":
            with pytest.raises(RowError, match=f"^sequence 0 row {lost[0]}( layer .*)?: wanted a row"):
                fetch()
            continue
        made = fetch()
        judge(made, shape, there, layers, tokens - 1, never if missing == "error" else distinct)
    batch = slime.LazyMicroBatch(
        lambda layers: fetch_shard(store, [handle], [tokens], Split(), missing="spread", layers=layers), chosen
    )
    for layer in chosen:
        rows = batch.layer(layer).materialize_for_routing_replay("forward")[:, None]
        judge(rows, shape, known, (layer,), tokens - 1, distinct)


# Batches of unlike samples --------------------------------------------------------------------------------------------

ONE = Shape(layer_ids=(1, 2), num_experts=8, num_layers=3, top_k=2)
UNLIKE = {
    "routed_layers": Shape(layer_ids=(0, 2), num_experts=8, num_layers=3, top_k=2),
    "num_layers": Shape(layer_ids=(1, 2), num_experts=8, num_layers=4, top_k=2),
    "top_k": Shape(layer_ids=(1, 2), num_experts=8, num_layers=3, top_k=1),
    "num_experts": Shape(layer_ids=(1, 2), num_experts=300, num_layers=3, top_k=2),
}
BATCHES: dict[str, Callable[[list[Routes]], Any]] = {
    "verl.padded": lambda both: verl.padded(both, [3, 3], [2, 2], 3, 2),
    "verl.jagged": lambda both: verl.jagged(both, [5, 5]),
    "verl.replay_mask": lambda both: verl.replay_mask(both, [5, 5]),
    "nemo_rl.batch": lambda both: nemo_rl.batch(both, [5, 5], 5),
    "skyrl": lambda both: skyrl.rollout_expert_indices(both, [5, 5]),
    "transformers.padded": lambda both: transformers.padded(both, torch.ones(2, 5, dtype=torch.int64)),
    "transformers.packed": lambda both: transformers.packed(both, [5, 5]),
}


@pytest.mark.parametrize("field", sorted(UNLIKE))
@pytest.mark.parametrize("adapter", sorted(BATCHES))
def test_unlike_samples_are_no_batch(adapter: str, field: str) -> None:
    """Goal: no sample is read with another sample's layout. Method: a second sample of another model, by every adapter;
    one that lacks a layer is of the same model."""
    first, other = ONE.whole(4), UNLIKE[field].whole(4)
    wanted, got = getattr(first, field), getattr(other, field)
    with pytest.raises(RowError) as refused:
        BATCHES[adapter]([first, other])
    assert (refused.value.field, refused.value.got) == (f"sample 1 {field}", got)
    assert str(refused.value.wanted) == f"{wanted}, as sample 0 has"
    BATCHES[adapter]([first, first])
    if adapter in ("verl.replay_mask", "nemo_rl.batch") or adapter.startswith("transformers"):
        lacks = Routes(first.ids[:, :1], first.valid, (1,), 8, 3, missing_layers=(2,))
        BATCHES[adapter]([first, lacks])
    with pytest.raises(KVRouteError, match=r"wanted one number for each of|wanted 1 for tokens and 0 for padding"):
        BATCHES[adapter]([first])
    with pytest.raises(KVRouteError):
        BATCHES[adapter]([])
    for at in range(2):
        batch: list[Any] = [first, first]
        batch[at] = None
        with pytest.raises(RowError, match=f"sample {at}: wanted routes, with no rows for .*, got NoneType"):
            BATCHES[adapter](batch)


def test_a_sample_without_a_handle_is_named(tmp_path: Path) -> None:
    store = open_rollouts(f"file:{tmp_path}")
    handle = store.put("a", ONE.whole(4))
    for handles in ([handle, None], [None, handle]):
        wanted = f"handle of sequence {handles.index(None)}: wanted a RolloutHandle, .*, got NoneType"
        with pytest.raises(KVRouteError, match=wanted):
            fetch_shard(store, handles, [5, 5], Split())  # type: ignore[arg-type]
    store.close()


def test_skyrl_gets_a_row_of_a_sample_that_trains_nothing() -> None:
    """Goal: a failed sample does not refuse its batch, and no trained token gets a made-up row. Method: no row, and one
    that lacks a layer, with and without a loss."""
    whole = ONE.whole(4)
    for failed in (whole.slice(0, 0), whole.without([1], np.arange(4) == 0)):
        one, other = skyrl.rollout_expert_indices([whole, failed], [5, 5], holes="cut", loss_masks=[[0, 1], [0, 0]])
        assert np.array_equal(one, whole.materialize(4))
        assert (other.dtype, other.tolist()) == (np.uint8, [[[0, 1]] * 3])
        for masks in ([[0, 0], [0, 1]], None):
            with pytest.raises(KVRouteError, match="sample 1: wanted a row at position 0"):
                skyrl.rollout_expert_indices([whole, failed], [5, 5], holes="cut", loss_masks=masks)
    with pytest.raises(KVRouteError, match="tokens, loss_masks: wanted one number for each of 1 samples"):
        skyrl.rollout_expert_indices([whole], [5], loss_masks=[])


def test_skyrl_says_a_hole_only_where_whole_rows_follow() -> None:
    """Goal: a partial last row is no hole. Method: the row at the end lacks a layer; one behind it makes it a hole."""
    lacks = ONE.whole(4).without([1], np.arange(4) == 3)
    (prefix,) = skyrl.rollout_expert_indices([lacks], [5])
    assert np.array_equal(prefix, ONE.whole(4).materialize(3))
    with pytest.raises(KVRouteError, match="no row behind position 3, which has no layer 1, got one at 4"):
        skyrl.rollout_expert_indices([lacks.merge(ONE.whole(5).slice(4, 5), tokens=range(6))], [6])


def test_a_sample_over_updates_names_its_last_least_and_largest_version() -> None:
    """Goal: verl's three numbers are told apart. Method: versions that rise, and ones that go back, as after a restart
    from an older checkpoint."""
    for versions, steps in ((((0, 2, 7), (2, 4, 9)), (9, 7, 9)), (((0, 1, 8), (1, 2, 9), (2, 4, 7)), (7, 7, 9))):
        named = verl.global_steps(ONE.routes(0, [True] * 4, versions=versions), 3, 2)
        assert tuple(named[name] for name in ("global_steps", "min_global_steps", "max_global_steps")) == steps


def test_the_last_token_has_no_row_and_no_version() -> None:
    """Goal: of n tokens n - 1 rows count. Method: a row of the last token, as an engine may have it, with other weights
    or of unknown ones; its bit in verl's mask, and the sample's versions."""
    whole = ONE.routes(0, [True] * 5, versions=((0, 4, 7), (4, 5, 8)))
    assert verl.replay_mask([whole], [5]).unbind()[0].tolist() == [True] * 4 + [False]
    assert verl.global_steps(whole, 3, 2) == {"global_steps": 7, "min_global_steps": 7, "max_global_steps": 7}
    assert slime.weight_versions(ONE.routes(0, [True] * 5, versions=((0, 4, 7),)), 5) == ["7"]
