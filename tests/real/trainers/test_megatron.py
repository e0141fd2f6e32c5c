"""Replay in a real GPTModel of Megatron-core: its own routers, dispatchers and multi-token prediction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from routes_of import expert_rows, made_routes

from cache_manager.errors import RowError
from kvroute.replay import megatron as replay
from kvroute.replay.rows import ReplayError
from kvroute.routes import Split

LAYERS = (1, 2, 3)
ALONE = Split()


@pytest.fixture
def model(megatron: Any) -> Any:
    from megatron.core.transformer.moe.router_replay import RouterReplay

    RouterReplay.clear_global_router_replay_instances()
    torch.manual_seed(1)
    return megatron.gpt()


def expected(samples: Sequence[int], rows: int) -> dict[int, torch.Tensor]:
    """The experts of each sample's first ``rows`` positions, sorted, ``[rows, samples, top_k]`` by layer."""
    whole = np.stack([expert_rows(s, np.arange(rows), LAYERS, 16, 4) for s in samples], axis=1)
    return {layer: torch.from_numpy(np.sort(whole[:, :, i])) for i, layer in enumerate(LAYERS)}


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 64, (batch, length), generator=torch.Generator().manual_seed(2))


def test_the_experts_used_are_the_rollouts(megatron: Any, model: Any) -> None:
    """Goal: routes of two samples of unlike length, in a padded batch, through a whole model, forward and backward.
    Method: where each router of the decoder sent each token; the last token's row and padding are spread, not one
    expert."""
    parts, lengths = [made_routes(1, 6), made_routes(2, 3)], [7, 4]
    used = megatron.Used(model)
    with replay.schedule(model):
        replay.install(model, replay.padded(model, parts, lengths, 7, ALONE, side="right"))
        megatron.run(model, tokens(2, 7)).mean().backward()
    assert sorted(used.experts) == list(LAYERS)  # the first layer is dense
    for layer, (experts,) in used.experts.items():
        by_place = experts.view(7, 2, 4)
        for column, (sample, length) in enumerate(zip((1, 2), lengths, strict=True)):
            rows = length - 1
            assert torch.equal(by_place[:rows, column], expected([sample], rows)[layer][:, 0])
    gradients = [model.decoder.layers[layer].mlp.router.weight.grad for layer in LAYERS]
    assert all(bool(g.abs().sum() > 0) for g in gradients)


def test_the_global_list_has_other_routers_too(megatron: Any, model: Any) -> None:
    """Goal: MTP routers and models thrown away are in Megatron's list and must not be addressed. Method: a second
    model, an MTP router that has a decoder layer's number, and one replay; MTP's router keeps choosing for itself."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    megatron.gpt()
    assert len(RouterReplay.global_router_replay_instances) == 8
    mtp = model.mtp.layers[0].transformer_layer.mlp.router
    mtp.set_layer_number(2)
    used = megatron.Used(model)
    assert replay.layer_ids(model) == LAYERS
    megatron.run(model, tokens(1, 5))
    with replay.schedule(model):
        replay.install(model, replay.packed(model, [made_routes(3, 4)], [5], ALONE))
        megatron.run(model, tokens(1, 5))
    for layer in LAYERS:
        assert torch.equal(used.experts[layer][1][:4], expected([3], 4)[layer][:, 0])
    assert mtp.router_replay.target_topk_idx is None
    assert mtp.router_replay.router_replay_action is None
    model.decoder.layers[1].mlp.router.set_layer_number(4)
    with pytest.raises(ReplayError, match=r"layer 3: wanted one router, got decoder.layers.1.*decoder.layers.3"):
        replay.layer_ids(model)


def test_recorded_routes_hold_through_an_update(megatron: Any, model: Any) -> None:
    """Goal: R2, and that it is bit-exact without an update. Method: Megatron records, we replay, move the weights,
    replay."""
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    batch = tokens(2, 6)
    used = megatron.Used(model)
    recording = [model.decoder.layers[layer].mlp.router.router_replay for layer in LAYERS]
    for each in recording:
        each.set_router_replay_action(RouterReplayAction.RECORD)
    plain = megatron.run(model, batch)
    rows = torch.stack([each.get_recorded_indices() for each in recording], dim=1)
    replay.clear(model)
    assert rows.shape == (12, 3, 4)
    with replay.schedule(model):
        replay.install(model, rows)
        assert torch.equal(megatron.run(model, batch), plain)
    with torch.no_grad():
        for layer in LAYERS:
            model.decoder.layers[layer].mlp.router.weight.normal_()
    megatron.run(model, batch)
    with replay.schedule(model):
        replay.install(model, rows)
        megatron.run(model, batch)
    for seen in used.experts.values():
        assert torch.equal(seen[1], seen[0])
        assert not torch.equal(seen[2], seen[0])
        assert torch.equal(seen[3], seen[0])


def micro_batch(stage: Any, megatron: Any, sample: int, *, learn: bool, reentrant: bool = False) -> Any:
    """One micro-batch's weights, from a checkpointed router whose recomputation asks for replayed ids again."""
    replay.install(stage, replay.packed(stage, [made_routes(sample, 5)], [6], ALONE))
    hidden = torch.randn(6, 1, megatron.HIDDEN, requires_grad=True)
    # A recomputation that stopped early would not be seen from outside.
    with torch.set_grad_enabled(learn), torch.utils.checkpoint.set_checkpoint_early_stop(False):
        answer = torch.utils.checkpoint.checkpoint(stage.decoder[0], hidden, use_reentrant=reentrant)
    return answer[0].square().sum()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("order", [(2, 3, 4), (4, 3, 2), (3, 4, 2)])
def test_a_recomputation_has_the_experts_of_its_own_forward_pass(
    megatron: Any, order: tuple[int, ...], reentrant: bool
) -> None:
    """Goal: SkyRL 1908, verl 5219, AReaL 1166: recomputations take another micro-batch's routes. Method: in one
    schedule passes without a gradient, then three with one, whose backward passes run in any order, between them a
    forward pass of a further micro-batch; nothing is left for the next schedule."""
    stage = megatron.Stage(LAYERS, megatron.config())
    used = megatron.Used(stage)
    with replay.schedule(stage):
        for sample in (4, 1):
            micro_batch(stage, megatron, sample, learn=False)
        losses = {s: micro_batch(stage, megatron, s, learn=True, reentrant=reentrant) for s in (2, 3, 4)}
        replay.backward(stage)
        losses[order[0]].backward()
        last = micro_batch(stage, megatron, 5, learn=True, reentrant=reentrant)
        replay.backward(stage)
        for sample in order[1:]:
            losses[sample].backward()
        last.backward()
    for experts, sample in zip(used.experts[1], (4, 1, 2, 3, 4, order[0], 5, *order[1:], 5), strict=True):
        assert torch.equal(experts[:5], expected([sample], 5)[1][:, 0])
    assert all(not router.router_replay.replay_backward_list for router in stage.decoder)
    assert all(router.router_replay.router_replay_action is None for router in stage.decoder)


def test_a_recomputation_without_its_rows_is_an_error(megatron: Any) -> None:
    """Goal: never the router's own choice, or another's rows, in silence. Method: a backward pass after the schedule,
    one of a pass before it inside, one inside a recomputation, and a forward pass for which nothing was installed."""
    stage = megatron.Stage(LAYERS, megatron.config())
    router = stage.decoder[0]

    def checkpoint(fn: Any, hidden: torch.Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(fn, hidden, use_reentrant=True).sum()

    def weights(hidden: torch.Tensor) -> Any:
        return router(hidden)[0].square()

    hidden = torch.randn(6, 1, megatron.HIDDEN, requires_grad=True)
    rows = replay.packed(stage, [made_routes(1, 5)], [6], ALONE)
    plain = checkpoint(weights, hidden)
    with replay.schedule(stage):
        late = micro_batch(stage, megatron, 1, learn=True, reentrant=True)
        with pytest.raises(ReplayError, match="layer 1: wanted a recomputation of a forward pass that had rows"):
            plain.backward()
        replay.install(stage, rows)
        nested = checkpoint(lambda x: checkpoint(weights, x), hidden)
        replay.backward(stage)
        with pytest.raises(ReplayError, match="layer 1: wanted no recomputation inside a recomputation"):
            nested.backward()
        with pytest.raises(ReplayError, match="layer 1: wanted rows for a forward pass, by install, got none since"):
            router(hidden)
    with pytest.raises(ReplayError, match="layer 1: wanted a backward pass inside the replay of its forward pass"):
        late.backward()
    router(hidden)


def test_virtual_pipeline_chunks_are_one_model(megatron: Any) -> None:
    """Goal: VPP: a stage has chunks of layers that do not follow each other. Method: a list of two chunks, layers
    1 and 3 in one, 2 in the other, in an order that is not theirs."""
    made = megatron.config()
    chunks = [megatron.Stage((3, 1), made), megatron.Stage((2,), made)]
    used = [megatron.Used(chunk) for chunk in chunks]
    assert replay.layer_ids(chunks) == LAYERS
    with replay.schedule(chunks):
        replay.install(chunks, replay.packed(chunks, [made_routes(6, 5)], [6], ALONE))
        for chunk in chunks:
            chunk(torch.randn(6, 1, megatron.HIDDEN))
    for layer, seen in {**used[0].experts, **used[1].experts}.items():
        assert torch.equal(seen[0][:5], expected([6], 5)[layer][:, 0])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (torch.zeros(5, 3, 4), "rows: wanted integers, got torch.float32"),
        (torch.zeros(5, 4, 4, dtype=torch.int64), r"got torch.int64 of shape \(5, 4, 4\)"),
        (torch.full((5, 3, 4), -1), r"rows token 0 layer 1: wanted distinct ids in \[0, 16\), got \[-1, -1, -1, -1\]"),
    ],
)
def test_rows_that_do_not_fit_are_refused_whole(megatron: Any, rows: torch.Tensor, message: str) -> None:
    """Goal: nothing is installed by a refused call. Method: every misfit, then look at the routers."""
    stage = megatron.Stage(LAYERS, megatron.config())
    with pytest.raises(ReplayError, match=message):
        replay.install(stage, rows)
    assert all(router.router_replay.target_topk_idx is None for router in stage.decoder)
    assert all(router.router_replay.router_replay_action is None for router in stage.decoder)


def test_models_that_cannot_replay_are_refused(megatron: Any) -> None:
    """Goal: never a replay that silently does nothing. Method: no replay objects, a fused router, a router without a
    number, a hole in the routes."""
    with pytest.raises(ReplayError, match="moe_enable_routing_replay, got none"):
        replay.layer_ids(megatron.Stage(LAYERS, megatron.config(moe_enable_routing_replay=False)))
    stage = megatron.Stage(LAYERS, megatron.config())
    rows = replay.packed(stage, [made_routes(1, 5)], [6], ALONE)
    stage.config.moe_router_fusion = True
    with pytest.raises(ReplayError, match="a fused router ignores replay"):
        replay.install(stage, rows)
    stage.config.moe_router_fusion = False
    with pytest.raises(RowError, match="sequence 1 row 2: wanted a row"):
        replay.packed(stage, [made_routes(1, 5), made_routes(2, 5, holes=(2,))], [6, 6], ALONE)
    stage.decoder[1].layer_number = None
    with pytest.raises(ReplayError, match=r"decoder.1: wanted a layer number"):
        replay.layer_ids(stage)
