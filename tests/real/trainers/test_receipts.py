"""Receipts of what Megatron's routers used under each trainer's own replay: right, and wrong in silence.

The replays are the trainers' own unchanged code; a watch is not told which it is, or whether it ran."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mcore
import pytest
import ranks
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from routes_of import made_routes
from skyrl.backends.skyrl_train.utils import replay_utils as skyrl_replay
from verl.utils.megatron import router_replay_patch as verl_patch
from verl.utils.megatron import router_replay_utils as verl_replay

from kvroute.replay import ReplayError, megatron, skyrl, verl, watch
from kvroute.routes import Routes, Split

LAYERS, TOKENS = (1, 2, 3), 7
AGAIN = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def routes_of(sample: int) -> list[Routes]:
    return [made_routes(sample, TOKENS - 1)]


def gaps_of(replayed: Any) -> set[tuple[int | None, int | None, int | None]]:
    return {(gap.micro_batch, gap.layer, gap.sample) for gap in replayed.receipt().gaps}


@pytest.fixture
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of random numbers, which Megatron's recomputation expects on a GPU."""
    monkeypatch.setattr("megatron.core.tensor_parallel.random._get_cuda_rng_state", lambda **_: torch.zeros(0))
    monkeypatch.setattr("megatron.core.tensor_parallel.random._set_cuda_rng_state", lambda *_, **__: None)


@pytest.fixture
def _alone() -> Iterator[None]:
    """One rank, for one test: others here are each rank in turn."""
    with mcore.rank_of():
        yield


def whole_model() -> Any:
    RouterReplay.clear_global_router_replay_instances()
    torch.manual_seed(1)
    return mcore.gpt(**AGAIN)


# Megatron-core --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_on_a_cpu", "_alone")
@pytest.mark.parametrize("by_hand", [False, True])
def test_kvroutes_own_replay_has_a_whole_receipt(by_hand: bool) -> None:
    """Goal: every layer, micro-batch and recomputation of a whole model. Method: two micro-batches forward, backward
    the other way round; due by installation, and by the routes. Then one router's replay is switched off."""
    model = whole_model()
    tokens = torch.arange(TOKENS)[None]
    with watch(model) as replayed:
        assert replayed.layers == LAYERS
        with megatron.schedule(model):
            losses = []
            for sample in (1, 2):
                if by_hand:
                    replayed.packed(routes_of(sample), [TOKENS])
                megatron.install(model, megatron.packed(model, routes_of(sample), [TOKENS], Split()))
                losses.append(mcore.run(model, tokens + sample).mean())
            megatron.backward(model)
            for loss in reversed(losses):
                loss.backward()
        replayed.receipt().check()
        for use in replayed.receipt().uses:
            rows, name = (TOKENS - 1, 0) if by_hand else (TOKENS, None)  # padding is installed, too
            assert (use.samples[-1], use.due[-1], use.taken[-1], use.repeated[-1]) == (name, rows, rows, rows)
            assert (use.passes, use.recomputations) == (1, 1)
        with megatron.schedule(model):
            megatron.install(model, megatron.packed(model, routes_of(3), [TOKENS], Split()))
            model.decoder.layers[2].mlp.router.router_replay.clear_router_replay_action()
            with torch.no_grad():
                mcore.run(model, tokens)
    assert gaps_of(replayed) == {(2, 2, None)}


@pytest.mark.usefixtures("_on_a_cpu", "_alone")
def test_megatrons_first_in_first_out_list_is_seen_through() -> None:
    """Goal: AReaL 1166, SkyRL 1908: recomputations take another micro-batch's rows, in silence. Method: Megatron's own
    replay and list, two micro-batches, backward in both orders."""
    for order, gaps in (((0, 1), set[Any]()), ((1, 0), {(batch, n, 0) for batch in (0, 1) for n in LAYERS})):
        model = whole_model()
        with watch(model) as replayed:
            losses = []
            for sample in (1, 2):
                replayed.packed(routes_of(sample), [TOKENS])
                rows = megatron.packed(model, routes_of(sample), [TOKENS], Split())
                RouterReplay.set_replay_data([*rows.unbind(1), rows[:, 0]])  # the last one is MTP's
                RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
                losses.append(mcore.run(model, torch.arange(TOKENS)[None]).mean())
            RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
            for number in order:
                losses[number].backward()
        assert all(use.taken == use.due and use.recomputations == 1 for use in replayed.receipt().uses)
        assert gaps_of(replayed) == gaps
    wanted = "^micro-batch 0 layer 1 sample 0: wanted 6 tokens sent to the experts of their rows when computed again"
    with pytest.raises(ReplayError, match=wanted):
        replayed.receipt().check()


@pytest.mark.usefixtures("_on_a_cpu", "_alone")
def test_a_router_of_multi_token_prediction_that_replays_a_decoders_rows_is_a_gap() -> None:
    """Goal: NeMo-RL 3903: its number begins again at 1, so that it takes the rows of a layer of the decoder. Method:
    Megatron's own replay by layer numbers gives it those of layer 1, and then, as kvroute does, none."""
    model = whole_model()
    ahead = model.mtp.layers[0].transformer_layer.mlp.router
    ahead.set_layer_number(2)
    for replays in (True, False):
        with watch(model) as replayed, torch.no_grad():
            replayed.packed(routes_of(1), [TOKENS])
            rows = megatron.packed(model, routes_of(1), [TOKENS], Split())
            RouterReplay.set_replay_data([*rows.unbind(1), rows[:, 0]])
            RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            if not replays:
                ahead.router_replay.clear_router_replay_action()
            mcore.run(model, torch.arange(TOKENS)[None])
        gaps = [(gap.micro_batch, gap.layer, gap.wanted) for gap in replayed.receipt().gaps]
        name = "mtp.layers.0.transformer_layer.mlp.router"
        assert gaps == ([(0, 1, f"its own choice in {name}, of multi-token prediction")] if replays else [])
        RouterReplay.clear_global_indices()


@pytest.mark.usefixtures("_alone")
def test_a_model_that_was_built_without_replay_is_a_gap() -> None:
    """Goal: the flag that was left off. Method: a model without ``moe_enable_routing_replay``, which kvroute refuses to
    install into, run as a trainer would that goes by Megatron's empty list."""
    RouterReplay.clear_global_router_replay_instances()
    stage = mcore.Stage(LAYERS, mcore.config(moe_enable_routing_replay=False))
    with watch(stage) as replayed:
        replayed.packed(routes_of(1), [TOKENS])
        RouterReplay.set_replay_data([])
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        stage(torch.randn(TOKENS, 1, mcore.HIDDEN))
    assert gaps_of(replayed) == {(0, layer, 0) for layer in LAYERS}


@pytest.mark.usefixtures("_alone")
def test_chunks_of_a_virtual_pipeline_are_one_receipt() -> None:
    """Goal: a schedule that runs a chunk over several micro-batches before the next. Method: two chunks, installed
    apart, in that order, and what is due by hand; then one chunk's micro-batches are exchanged."""
    made = mcore.config()
    chunks = [mcore.Stage((1, 2), made), mcore.Stage((3,), made)]
    for by_hand, second, gaps in (
        (False, (1, 2), set()),
        (True, (1, 2), set()),
        (True, (2, 1), {(0, 3, 0), (1, 3, 0)}),
    ):
        with watch(chunks) as replayed, megatron.schedule(chunks):
            for chunk, samples in ((chunks[0], (1, 2)), (chunks[1], second)):
                for number, sample in enumerate(samples):
                    if by_hand:
                        replayed.packed(routes_of(number + 1), [TOKENS], layers=megatron.layer_ids(chunk))
                    megatron.install(chunk, megatron.packed(chunk, routes_of(sample), [TOKENS], Split()))
                    chunk(torch.randn(TOKENS, 1, mcore.HIDDEN))
        uses = replayed.receipt().uses
        assert [(use.micro_batch, use.layer) for use in uses] == [(b, n) for b in (0, 1) for n in LAYERS]
        assert gaps_of(replayed) == gaps


@pytest.mark.usefixtures("_alone")
def test_a_stage_without_routers_has_nothing_due() -> None:
    """Goal: no false alarm on a stage of dense layers; and one without experts at all is refused. Method: both."""
    stage = mcore.stage_of(mcore.config(num_layers=1, moe_layer_freq=[0]), first=True, last=False)
    with watch(stage) as replayed:
        replayed.packed(routes_of(1), [TOKENS])
    assert replayed.receipt().layers == ()
    replayed.receipt().check()
    dense = mcore.stage_of(
        mcore.config(
            num_layers=1,
            num_moe_experts=None,
            moe_layer_freq=[0],
            moe_ffn_hidden_size=None,
            moe_enable_routing_replay=False,
        ),
        first=True,
        last=False,
    )
    with pytest.raises(ReplayError, match="model: wanted"), watch(dense):
        pytest.fail("the block was entered")


@pytest.mark.usefixtures("_alone")
def test_ids_outside_the_experts_are_not_due() -> None:
    """Goal: a comparison never writes outside its map. Method: an id too large, by arrays and by another model's
    routes."""
    stage = mcore.Stage(LAYERS, mcore.config())
    with watch(stage) as replayed:
        with pytest.raises(ReplayError, match=r"rows token 0 layer 1: wanted ids in \[0, 16\), or -1 throughout, got"):
            replayed.due(torch.full((TOKENS, 3, 4), 16))
        with pytest.raises(ReplayError, match="experts of sample 0: wanted 16, as the routers have, got 32"):
            replayed.packed([made_routes(1, 6, experts=32)], [TOKENS])
        assert replayed.receipt().uses == ()


# verl -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ranks.CASES)
def test_verls_engine_on_every_rank(case: ranks.Case) -> None:
    """Goal: the rows that are due on a rank are those that verl's packing, scatter and class bring there. Method: each
    rank in turn; holes, which verl's mask leaves to the router, are not due. Then verl's engine is left out."""
    due = 0
    for rank in range(case.tp * case.cp * case.pp):
        with ranks.verl_patched(), mcore.rank_of(rank, case.tp * case.cp * case.pp, case.tp, case.pp, case.cp):
            stage, numbers = case.stage(), ranks.packed_numbers(case)
            with watch(stage) as replayed:
                replayed.packed(ranks.ROUTES, ranks.TOKENS, case.split())
                ranks.verl_replays(stage, verl.jagged(ranks.ROUTES, ranks.TOKENS), ranks.numbered())
                stage(ranks.hidden_for(numbers))
                replayed.receipt().check()
                due += replayed.receipt().due
                replayed.packed(ranks.ROUTES, ranks.TOKENS, case.split())
                for router in stage.decoder:
                    router.router_replay.clear_indices()
                stage(ranks.hidden_for(numbers))
            assert {gap.micro_batch for gap in replayed.receipt().gaps} <= {1}
            assert gaps_of(replayed) or not any(sum(use.due) for use in replayed.receipt().uses)
    assert due == sum(tokens - 1 for tokens in ranks.TOKENS) * len(ranks.LAYERS)


def test_verls_mask_leaves_holes_to_the_router(verl_stage: mcore.Stage) -> None:
    """Goal: a hole is not due. Method: rows with holes under our mask; without the mask their zeros are replayed, and
    the rows that are there are used all the same."""
    routes = [made_routes(1, 8, holes=(2, 3))]
    with watch(verl_stage) as replayed:
        replayed.packed(routes, [9])
        rows, mask = verl.jagged(routes, [9], missing="zero"), verl.replay_mask(routes, [9])
        ranks.verl_replays(
            verl_stage, rows, torch.nested.as_nested_tensor([torch.arange(9)], layout=torch.jagged), mask
        )
        verl_stage(torch.randn(9, 1, mcore.HIDDEN))
    replayed.receipt().check()
    assert [use.due for use in replayed.receipt().uses] == [(6,)] * 3


def test_rows_for_orphan_routers_are_a_gap() -> None:
    """Goal: verl 7340: a decoder that was built twice; rows go to the first one's routers, and the model's own choose
    for themselves, in silence. Method: verl's code gives them to that decoder (by position, as then, it now refuses
    to), and then to the one that runs."""
    routes, tokens = [made_routes(1, 8)], torch.nested.as_nested_tensor([torch.arange(9)], layout=torch.jagged)
    with ranks.verl_patched(), mcore.rank_of():
        orphan, stage = mcore.Stage(LAYERS, mcore.config()), mcore.Stage(LAYERS, mcore.config())
        rows = verl_replay.align_r3_router_replay_data(verl.jagged(routes, [9]), tokens)
        mask = verl_replay.build_r3_replay_mask(tokens, torch.ones(1, 1))
        for model, gaps in ((orphan, {(0, layer, 0) for layer in LAYERS}), (stage, set())):
            with watch(stage) as replayed:
                replayed.packed(routes, [9])
                verl_replay.set_router_replay_data(rows, None, stage.config, replay_mask=mask, model=model)
                verl_patch.RouterReplay.set_global_router_replay_action(verl_patch.RouterReplayAction.REPLAY_FORWARD)
                stage(torch.randn(9, 1, mcore.HIDDEN))
            assert gaps_of(replayed) == gaps


# SkyRL ----------------------------------------------------------------------------------------------------------------


def skyrl_output() -> dict[str, Any]:
    return {
        "prompt_token_ids": [[1] * (count - 3) for count in ranks.TOKENS],
        "response_ids": [[2, 3, 4]] * len(ranks.TOKENS),
        "rollout_expert_indices": skyrl.rollout_expert_indices(ranks.ROUTES, ranks.TOKENS),
    }


@pytest.mark.parametrize("case", ranks.CASES)
def test_skyrls_micro_batches_on_every_rank(case: ranks.Case) -> None:
    """Goal: as for verl. Method: SkyRL's preparation of a packed micro-batch; then without it."""
    due = 0
    for rank in range(case.tp * case.cp * case.pp):
        with mcore.rank_of(rank, case.tp * case.cp * case.pp, case.tp, case.pp, case.cp):
            RouterReplay.clear_global_router_replay_instances()
            stage = case.stage()
            stage.config.sequence_parallel = False  # it cuts its mask by a class that this Megatron-core lacks
            with watch(stage) as replayed, skyrl_replay.router_replay_schedule(enabled=True):
                replayed.packed(ranks.ROUTES, ranks.TOKENS, case.split())
                numbers = ranks.scattered(ranks.skyrl_replays(stage, skyrl_output(), packed=True), case)
                stage(ranks.hidden_for(numbers))
                replayed.receipt().check()
                due += replayed.receipt().due
                replayed.packed(ranks.ROUTES, ranks.TOKENS, case.split())
                skyrl_replay.clear_router_replay()
                stage(ranks.hidden_for(numbers))
            assert {gap.micro_batch for gap in replayed.receipt().gaps} <= {1}
    assert due == sum(tokens - 1 for tokens in ranks.TOKENS) * len(ranks.LAYERS)


@pytest.mark.usefixtures("_alone")
def test_rows_in_skyrls_unpacked_order_are_a_gap() -> None:
    """Goal: SkyRL 2091: an unpacked batch is laid out sample by sample, while Megatron's routers see it position by
    position. Method: its own code with three samples, and with each alone, which is right."""
    assert parallel_state.get_context_parallel_world_size() == 1
    for samples in ([0, 1, 2], [0], [1], [2]):
        RouterReplay.clear_global_router_replay_instances()
        stage = ranks.Case().stage()
        output = {name: [values[i] for i in samples] for name, values in skyrl_output().items()}
        lengths = [ranks.TOKENS[i] for i in samples]
        with watch(stage) as replayed:
            routes = [ranks.ROUTES[i] for i in samples]
            replayed.padded(routes, lengths, max(lengths), side="left", order="sequence")
            numbers = ranks.skyrl_replays(stage, output, samples, packed=False)
            stage(ranks.hidden_for(numbers))
        skyrl_replay.clear_router_replay()
        assert bool(gaps_of(replayed)) == (len(samples) > 1)
