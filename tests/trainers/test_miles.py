"""What miles makes of the routes it is given: its sample, its answers from SGLang, its cut, its replay list."""

from __future__ import annotations

import ast
import inspect
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mcore
import miles.backends.megatron_utils as backend
import numpy as np
import pytest
import torch
from miles.backends.megatron_utils.replay_utils import get_register_replay_list_func
from miles.backends.training_utils import cp_utils, parallel
from miles.rollout.generate_utils.generate_endpoint_utils import get_rollout_topk_from_response
from miles.rollout.generate_utils.sample_utils import merge_samples
from miles.utils.replay_base import RoutingReplayManager
from miles.utils.types import Sample
from routes_of import expert_rows, made_routes

from kvroute.encodings import encode
from kvroute.replay import slime
from kvroute.routes import Routes, shard_packed

LAYERS = (1, 2, 3)
MULTIPLE = 4


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What miles takes for granted on a GPU: a current device (mcore has one), and memory to pin."""
    plain = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda like, pin_memory=False, **more: plain(like, **more))  # noqa: ARG005


def fill_replay_data() -> Callable[..., None]:
    """``MegatronTrainRayActor._fill_replay_data`` as miles has it; the rest of its module wants CUDA."""
    module = ast.parse(Path(inspect.getfile(backend)).with_name("actor.py").read_text())
    (found,) = [n for n in ast.walk(module) if isinstance(n, ast.FunctionDef) and n.name == "_fill_replay_data"]
    names = {"torch": torch, "slice_with_cp": cp_utils.slice_with_cp, "get_parallel_state": parallel.get_parallel_state}
    exec(compile(ast.Module([found], []), "actor.py", "exec"), names)  # noqa: S102 - the trainer's own code
    return names["_fill_replay_data"]  # type: ignore[return-value]


class Batches:
    """miles' data iterator of one micro-batch."""

    def __init__(self, **columns: Any) -> None:
        self.columns = columns

    def reset(self) -> None: ...

    def get_next(self, names: list[str]) -> dict[str, Any]:
        return {name: self.columns.get(name) for name in names}


@pytest.fixture
def rank() -> Iterator[Callable[..., None]]:
    one = parallel.GroupInfo(0, 1, None)

    def of(tp: tuple[int, int], cp: tuple[int, int]) -> None:
        groups = {"tp": parallel.GroupInfo(*tp, None), "cp": parallel.GroupInfo(*cp, None)}
        others = dict.fromkeys(("intra_dp", "intra_dp_cp", "pp", "ep", "etp"), one)
        parallel.set_parallel_state(parallel.ParallelState(**others, **groups))

    yield of
    parallel._parallel_state = None


def sample(routes: Routes, tokens: int, response: int) -> Sample:
    made = Sample(tokens=list(range(tokens)), response_length=response, status=Sample.Status.COMPLETED)
    made.rollout_routed_experts = slime.miles_sample(routes, tokens)
    made.weight_versions = slime.weight_versions(routes, tokens)
    made.validate()
    return made


def test_a_sample_has_a_row_less_than_tokens() -> None:
    """Goal: miles' own count. Method: its validation, of what fits and of a row too few; its cut at the end."""
    made = sample(versioned(made_routes(1, 9)), 10, 4)
    assert made.weight_versions == ["3", "5"]
    made.strip_last_output_tokens(2, SimpleNamespace(decode=str))
    made.validate()
    assert np.array_equal(made.rollout_routed_experts, slime.miles_sample(made_routes(1, 9), 8))
    made.rollout_routed_experts = made.rollout_routed_experts[:-1]
    with pytest.raises(AssertionError, match="rollout_routed_experts length"):
        made.validate()


def versioned(routes: Routes) -> Routes:
    """``routes`` whose rows from the fifth on are of other weights."""
    spans = ((0, 5, 3), (5, len(routes), 5)) if len(routes) > 5 else ((0, len(routes), 3),)
    return Routes(routes.ids, routes.valid, routes.layer_ids, 16, 4, weights_versions=spans)


def test_turns_are_merged_to_the_rows_of_the_last() -> None:
    """Goal: rows of a conversation. Method: miles merges two turns of one sequence, the second with an observation."""
    whole = versioned(made_routes(2, 14))
    turns = [sample(whole, 8, 3), sample(whole, 15, 4)]
    merged = merge_samples(turns, SimpleNamespace(decode=str))
    assert np.array_equal(merged.rollout_routed_experts[:, 1:], expert_rows(2, np.arange(14), LAYERS, 16, 4))
    assert merged.weight_versions == ["3", "5", "3", "5"]


def test_an_answer_as_sglang_has_it_is_the_sample() -> None:
    """Goal: the encoding is SGLang's. Method: miles reads it out of an answer."""
    routes = made_routes(3, 6)
    answer = {"meta_info": {"routed_experts": encode(routes, "sglang")}}
    args = Namespace(num_layers=4, moe_router_topk=4)
    rows = get_rollout_topk_from_response(args, answer, Namespace(tokens=[0] * 7), "routed_experts")
    assert np.array_equal(rows, slime.miles_sample(routes, 7))


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_replay_what_the_rollout_chose(rank: Callable[..., None], tp: int, cp: int) -> None:
    """Goal: whole samples through miles, and shards that a rank reads by itself, are the same experts, and its router
    takes them. Method: every rank: miles' cut and replay list beside `slime.split`, then its top-k over random scores;
    padding, which both spell by themselves, is left out. Its replay list then takes the shards instead."""
    tokens = [9, 6]
    routes = [made_routes(i, n - 1) for i, n in enumerate(tokens)]
    seen = 0
    chunk = SimpleNamespace(module=SimpleNamespace(config=mcore.config()))
    for t in range(tp):
        for c in range(cp):
            rank((t, tp), (c, cp))
            manager = RoutingReplayManager()
            manager.enabled, manager.stage = True, "replay_forward"
            replays = [manager.create_replay() for _ in LAYERS]
            actor = Namespace(
                args=Namespace(qkv_format="thd", data_pad_size_multiplier=MULTIPLE, sequence_parallel=tp > 1),
                model=[chunk],
            )
            rows = [torch.from_numpy(slime.miles_sample(r, n)) for r, n in zip(routes, tokens, strict=True)]
            column = {manager.data_key: rows}
            batch = Batches(tokens=[torch.zeros(n) for n in tokens], **column)
            register = get_register_replay_list_func(manager)
            with mcore.rank_of():
                fill_replay_data()(actor, [batch], [1], column, manager.data_key, replays, register)
            split = slime.split(tp, t, cp, c, sequence_parallel=tp > 1, data_pad_size_multiplier=MULTIPLE)
            shard = torch.from_numpy(shard_packed(routes, tokens, split, LAYERS))
            topk = manager.get_topk_fn(lambda scores, k: torch.topk(scores, k), return_probs=False)
            for index, replay in enumerate(replays):
                kept = replay.top_indices_list[0]
                real = (kept != -1).all(dim=1)
                assert kept.shape == shard[:, index].shape
                seen += int(real.sum())
                assert torch.equal(kept[real].long(), shard[real, index])
                manager.set_current(replay)
                scores = torch.rand(len(kept), mcore.EXPERTS)
                assert torch.equal(topk(scores, mcore.TOP_K)[real].long(), shard[real, index])
                replay.clear()
                replay.record(shard[:, index].contiguous())
                assert torch.equal(topk(scores, mcore.TOP_K), shard[:, index])
    assert seen == len(LAYERS) * sum(n - 1 for n in tokens)
