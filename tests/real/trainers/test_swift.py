"""Routes in ms-swift: its batch, its cut by rank, its replay of our routes."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from types import SimpleNamespace

import mcore
import numpy as np
import pytest
import ranks
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from routes_of import expert_rows
from sources import code_of, installed

from kvroute.replay import slime

SPLIT = code_of(installed("mcore_bridge") / "utils" / "megatron_utils.py", "split_cp_inputs", mpu=parallel_state)
BATCH = code_of(
    installed("swift") / "rlhf_trainers" / "utils.py",
    *("_normalize_routed_experts_tensor", "_pad_or_trim_routed_experts", "build_routed_experts_batch"),
)
REPLAY = code_of(
    installed("swift") / "megatron" / "utils" / "router_replay_utils.py",
    *("is_moe_layer", "get_moe_num_layers_to_build", "get_local_layer_range", "get_local_topk_idx_for_current_rank"),
    *("set_router_replay_data", "RouterReplayHelper"),
    mpu=parallel_state,
    RouterReplay=RouterReplay,
    RouterReplayAction=RouterReplayAction,
    get_num_layers_to_build=get_num_layers_to_build,
    get_transformer_layer_offset=get_transformer_layer_offset,
    scatter_to_sequence_parallel_region=scatter_to_sequence_parallel_region,
    split_cp_inputs=SPLIT["split_cp_inputs"],
    device_name="cpu",
)
WIRE = code_of(
    installed("swift") / "infer_engine" / "protocol.py",
    "serialize_ndarray",
    "deserialize_ndarray",
    np=np,
    base64=base64,
)
SAMPLE = code_of(
    installed("swift") / "rl_core" / "data.py", "apply_rollout_output", remove_response=lambda messages: messages
)
SAMPLES = [
    SimpleNamespace(routed_experts=slime.sample(routes, tokens), encoded={"length": tokens})
    for routes, tokens in zip(ranks.ROUTES, ranks.TOKENS, strict=True)
]


def batch(samples: list[SimpleNamespace], lengths: list[int], width: int, *, padding_free: bool) -> torch.Tensor:
    """``routed_experts`` of a batch of samples, which take so many places each."""
    template = SimpleNamespace(padding_side="right", padding_free=padding_free)
    how = {"seq_lengths": torch.tensor(lengths), "max_seq_len": width, "template": template, "device": "cpu"}
    return BATCH["build_routed_experts_batch"](samples, **how, router_replay_mode="R3")  # type: ignore[no-any-return]


def rows_of(sample: int) -> torch.Tensor:
    rows = ranks.TOKENS[sample] - 1
    return torch.from_numpy(expert_rows(sample, np.arange(rows), ranks.LAYERS, mcore.EXPERTS, mcore.TOP_K))


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """ms-swift goes by Megatron's list of every router."""
    RouterReplay.clear_global_router_replay_instances()
    yield
    RouterReplay.clear_global_router_replay_instances()


def test_a_padded_batch_has_the_rows_in_their_places() -> None:
    """Goal: ms-swift's count of rows is ours. Method: its batch of samples padded on the right; a row too few."""
    rows = batch(SAMPLES, list(ranks.TOKENS), 16, padding_free=False)
    for i, tokens in enumerate(ranks.TOKENS):
        assert torch.equal(rows[i, : tokens - 1, list(ranks.LAYERS)], rows_of(i))
        assert not rows[i, tokens - 1 :].any()
    cut = [SimpleNamespace(routed_experts=s.routed_experts[:-1], encoded=s.encoded) for s in SAMPLES]
    with pytest.raises(AssertionError, match="does not match encoded length"):
        batch(cut, list(ranks.TOKENS), 16, padding_free=False)


def test_rows_of_an_answer_reach_the_batch_over_its_wire() -> None:
    """Goal: rows between ms-swift's rollout server and its trainer. Method: a choice as JSON and back by its own
    functions, put onto a sample by its own method, then its batch."""
    said = json.loads(json.dumps(WIRE["serialize_ndarray"](slime.sample(ranks.ROUTES[0], ranks.TOKENS[0]).numpy())))
    choice = SimpleNamespace(
        routed_experts=WIRE["deserialize_ndarray"](said),
        message=SimpleNamespace(content="said"),
        token_ids=[1, 2],
        logprobs=None,
        finish_reason="stop",
    )
    answer = SimpleNamespace(
        response=SimpleNamespace(choices=[choice]),
        **dict.fromkeys(("messages", "response_token_ids", "rollout_logprobs", "rollout_infos")),
    )
    sample = SimpleNamespace(messages=[], routed_experts=None, encoded={"length": ranks.TOKENS[0]})
    SAMPLE["apply_rollout_output"](sample, rollout_output=answer)
    rows = batch([sample], [ranks.TOKENS[0]], 16, padding_free=False)
    assert torch.equal(rows[0, : ranks.TOKENS[0] - 1, list(ranks.LAYERS)], rows_of(0))


def replayed(case: ranks.Case) -> int:
    """The cells that this rank's routers took from the rollout, where ms-swift cuts token numbers as it cuts rows."""
    align = 2 * case.cp if case.cp > 1 else 1
    lengths = [-(-n // align) * align for n in ranks.TOKENS]
    tail = -sum(lengths) % (case.tp * case.cp * 2)
    lengths += [tail] if tail else []
    rows = batch(SAMPLES, lengths, 0, padding_free=True)
    places = zip([*ranks.numbered().unbind(), torch.zeros(0, dtype=torch.int64)], lengths, strict=False)
    numbers = torch.cat([torch.nn.functional.pad(n, (0, length - len(n))) for n, length in places])
    ends = torch.tensor(np.cumsum([0, *lengths]))
    packing = SimpleNamespace(cu_seqlens_q=ends)
    if case.cp > 1:
        numbers = SPLIT["split_cp_inputs"](numbers[None], ends, 1, case.layout)[0]
    numbers, stage, cells = ranks.scattered(numbers, case), case.stage(), 0
    mine = REPLAY["get_local_topk_idx_for_current_rank"](rows, stage.config, packing, case.layout)
    REPLAY["set_router_replay_data"](mine, stage.config)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    assert REPLAY["RouterReplayHelper"].is_replay_forward_action(stage.config)
    for router, (_, routing_map) in zip(stage.decoder, stage(ranks.hidden_for(numbers)), strict=True):
        for row, number in zip(routing_map, numbers.tolist(), strict=True):
            sample, position = divmod(number - 1, 100)
            if number and position < ranks.TOKENS[sample] - 1:
                wanted = rows_of(sample)[position, ranks.LAYERS.index(router.layer_number - 1)]
                assert torch.equal(row.nonzero()[:, 0], wanted.sort().values)
                cells += 1
    return cells


@pytest.mark.parametrize("case", ranks.CASES + ranks.CONTIGUOUS)
def test_every_rank_uses_the_rollouts_experts(case: ranks.Case) -> None:
    """Goal: R3 of a trainer that goes by position. Method: this process is each rank in turn; real tokens are
    recognised by ms-swift's cut of token numbers, and all ranks together compare every row and layer."""
    cells = 0
    for rank in range(case.tp * case.cp * case.pp):
        RouterReplay.clear_global_router_replay_instances()
        with mcore.rank_of(rank, case.tp * case.cp * case.pp, case.tp, case.pp, case.cp):
            cells += replayed(case)
    assert cells == sum(tokens - 1 for tokens in ranks.TOKENS) * len(ranks.LAYERS)
