"""What SkyRL makes of the routes it is given: its canonical arrays, its wire, its trace of turns, its token order."""

from __future__ import annotations

from collections.abc import Iterator

import mcore
import numpy as np
import pytest
import torch
from routes_of import expert_rows, made_routes
from skyrl.backends.skyrl_train.distributed.megatron import token_metadata
from skyrl.backends.skyrl_train.utils import replay_utils
from skyrl.backends.skyrl_train.utils.routed_experts import RoutedExpertTrace, compact_routed_expert_indices
from skyrl.train.dataset import preprocess

from kvroute.replay import megatron, skyrl
from kvroute.routes import Split

LAYERS = (1, 2, 3)


@pytest.fixture
def stage() -> Iterator[mcore.Stage]:
    from megatron.core.transformer.moe.router_replay import RouterReplay

    RouterReplay.clear_global_router_replay_instances()
    with mcore.rank_of():
        yield mcore.Stage(LAYERS, mcore.config())


@pytest.mark.parametrize("experts", [16, 256, 300, 40000])
def test_the_arrays_are_canonical(experts: int) -> None:
    """Goal: SkyRL has nothing to narrow and nothing to refuse. Method: its own canonicaliser."""
    for seed in range(3):
        (rows,) = skyrl.rollout_expert_indices([made_routes(seed, 6, experts=experts)], [7])
        assert compact_routed_expert_indices(rows) is rows


def test_turns_are_recorded_as_deltas() -> None:
    """Goal: each turn hands over the rows that the trace does not have. Method: SkyRL's trace over three turns, the
    last of which computes the last token of the one before."""
    whole = made_routes(4, 19)
    trace = RoutedExpertTrace()
    for prompt, generated in [(5, 3), (11, 2), (16, 4)]:  # prompts hold the turns before, and observations
        rows = skyrl.delta(whole, trace.prompt_start, prompt + generated)
        trace.record_generation(prompt_token_count=prompt, generated_token_count=generated, routed_experts=rows)
    kept = trace.finalize(token_count=20, loss_mask=[0] * 5 + [1] * 15)
    assert np.array_equal(kept[:, 1:], expert_rows(4, np.arange(19), LAYERS, 16, 4))


def test_the_token_order_of_unpacked_batches(stage: mcore.Stage) -> None:
    """Goal: SkyRL lays out a batch sample by sample, Megatron's routers see it position by position. Method: a batch
    of two, unpacked: through SkyRL tokens get each other's experts (its default packs, and is right: test_ranks); what
    `megatron.padded` gives the same routers is right."""
    routes, tokens = [made_routes(1, 5), made_routes(2, 5)], [6, 6]
    wanted = [expert_rows(s, np.arange(5), LAYERS, 16, 4) for s in (1, 2)]
    hidden = torch.randn(6, 2, mcore.HIDDEN)

    def used_by() -> np.ndarray:
        maps = [mcore.chosen(routing_map).view(6, 2, 4) for _, routing_map in stage(hidden)]
        return torch.stack(maps, dim=2).numpy()[:5]  # [position, sample, layer, top_k]

    indices = skyrl.rollout_expert_indices(routes, tokens)
    made = preprocess.convert_prompts_responses_to_batch_tensors(
        0, [[1] * 3] * 2, [[2] * 3] * 2, [[0.0] * 3] * 2, [[1] * 3] * 2, rollout_expert_indices=indices
    )
    attention = made[1]
    mask = preprocess.make_router_padding_mask(attention, [5, 5])
    layout = token_metadata.build_token_metadata_layout(attention, torch.device("cpu"), packed=False, fp8_enabled=False)
    replay_utils.setup_per_microbatch_replay_forward(made[6], mask, attention, stage, stage.config, layout)
    right = np.sort(np.stack(wanted, axis=1))
    assert not np.array_equal(used_by(), right)
    replay_utils.clear_router_replay()

    with megatron.schedule(stage):
        megatron.install(stage, megatron.padded(stage, routes, tokens, 6, Split(), side="right"))
        assert np.array_equal(used_by(), right)
