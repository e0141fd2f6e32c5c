"""Routes in miles: its sample, its answers from SGLang, its cut, its replay list."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mcore
import numpy as np
import pybase64
import pytest
import torch
from miles.backends.megatron_utils.replay_utils import get_register_replay_list_func
from miles.backends.training_utils import cp_utils, parallel
from miles.backends.training_utils.data import DataIterator
from miles.rollout.generate_utils.generate_endpoint_utils import update_sample_from_response
from miles.rollout.generate_utils.openai_endpoint_utils import compute_samples_from_openai_records
from miles.rollout.generate_utils.sample_utils import merge_samples
from miles.rollout.session.session_types import SessionRecord
from miles.utils.replay_base import RoutingReplayManager
from miles.utils.types import Sample
from routes_of import expert_rows, made_routes
from sources import code_of, installed
from waiting import GIVE_UP_S

from kvroute.encodings import encode
from kvroute.replay import slime
from kvroute.routes import Routes, shard_packed

LAYERS = (1, 2, 3)
MULTIPLE = 4


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Things that miles expects on a GPU: a current device (mcore has one), and memory to pin."""
    plain = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda like, pin_memory=False, **more: plain(like, **more))  # noqa: ARG005


def fill_replay_data() -> Callable[..., None]:
    """``MegatronTrainRayActor._fill_replay_data`` as miles has it; the rest of its module wants CUDA."""
    names = {"slice_with_cp": cp_utils.slice_with_cp, "get_parallel_state": parallel.get_parallel_state}
    actor = installed("miles") / "backends" / "megatron_utils" / "actor.py"
    return code_of(actor, "_fill_replay_data", **names)["_fill_replay_data"]  # type: ignore[no-any-return]


def micro_batch(samples: list[Sample]) -> DataIterator:
    """The output of miles' rollout manager for samples, for the one rank of data parallelism, as one micro-batch."""
    named = code_of(
        installed("miles") / "ray" / "rollout.py",
        *("_convert_samples_to_train_data", "_split_train_data_by_dp"),
        Sample=Sample,
        ray=SimpleNamespace(put=dict),
        Box=dict,
    )
    manager = SimpleNamespace(
        args=Namespace(use_dynamic_global_batch_size=False, balance_data=False),
        custom_convert_samples_to_train_data_func=None,
        _post_process_rewards=lambda of: ([1.0] * len(of), [1.0] * len(of)),
    )
    data = named["_convert_samples_to_train_data"](manager, samples)
    (mine,) = named["_split_train_data_by_dp"](manager, data, 1)
    mine["tokens"] = [torch.tensor(tokens) for tokens in mine["tokens"]]
    mine["rollout_routed_experts"] = [torch.from_numpy(rows) for rows in mine["rollout_routed_experts"]]
    return DataIterator(mine, micro_batch_size=len(samples))


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
    """Goal: miles' own count. Method: its validation, of the right number of rows and of one too few; its cut at the
    end."""
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


def record(routes: Routes, prompt: int, end: int, version: str) -> SessionRecord:
    """A turn of a session, as miles' proxy keeps what SGLang answered: token ``i`` is called ``i``."""
    meta = {
        "routed_experts": encode(routes.slice(0, end - 1), "sglang"),
        "output_token_logprobs": [(0.0, token) for token in range(prompt, end)],
        "weight_version": version,
    }
    choice = {"meta_info": meta, "finish_reason": "stop"}
    request = {"input_ids": list(range(prompt))}
    return SessionRecord(
        timestamp=0.0, method="POST", path="/", request=request, response={"choices": [choice]}, status_code=200
    )


def test_a_session_becomes_one_sample_with_the_rows_of_its_last_turn() -> None:
    """Goal: rows of a conversation, encoded as SGLang has them. Method: miles makes samples of two answers, the second
    behind an observation, and merges them."""
    whole, decoder = made_routes(2, 14), SimpleNamespace(decode=str)
    args = Namespace(num_layers=4, moe_router_topk=4)
    turns = compute_samples_from_openai_records(
        args, Sample(), [record(whole, 5, 8, "3"), record(whole, 11, 15, "5")], decoder, list(range(15))
    )
    assert np.array_equal(turns[0].rollout_routed_experts, slime.miles_sample(whole, 8))
    merged = merge_samples(turns, decoder)
    merged.validate()
    assert np.array_equal(merged.rollout_routed_experts[:, 1:], expert_rows(2, np.arange(14), LAYERS, 16, 4))
    assert merged.weight_versions == ["3", "5"]


async def answered(how: str, args: Namespace, sample: Sample, answer: dict[str, Any]) -> None:
    """miles' update of a sample from an answer of SGLang's, by its own endpoint's code or by its plain rollout."""
    if how == "endpoint":
        await update_sample_from_response(args, sample, {"input_ids": list(range(5))}, answer)
        return

    async def post(_url: str, payload: dict[str, Any], headers: object) -> dict[str, Any]:
        assert payload["return_routed_experts"]
        assert headers is None
        return answer

    encode_words = SimpleNamespace(encode=lambda _text, add_special_tokens: list(range(5)))  # noqa: ARG005
    state = SimpleNamespace(processor=None, tokenizer=encode_words)
    names = {"GenerateState": lambda _: state, "post": post, "is_lora_enabled": lambda _: False, "Sample": Sample}
    rollout = installed("miles") / "rollout" / "sglang_rollout.py"
    await code_of(rollout, "generate", np=np, pybase64=pybase64, **names)["generate"](
        args, sample, {"max_new_tokens": 9}
    )


@pytest.mark.parametrize("how", ["endpoint", "rollout"])
def test_an_answer_that_goes_on_has_every_row_once(how: str) -> None:
    """Goal: a partial rollout. Method: an answer that was aborted and one that goes on from it, each with the rows of
    all tokens so far, as SGLang encodes them; miles' sample has the rollout's rows and passes its validation."""
    whole, sample = made_routes(3, 14), Sample(prompt="p")
    args = Namespace(
        num_layers=4, moe_router_topk=4, use_miles_router=False, ci_test=False, use_rollout_routing_replay=True,
        sglang_router_ip="", sglang_router_port=0, sglang_router_policy="", sglang_speculative_algorithm=None,
        partial_rollout=True, mask_offpolicy_in_partial_rollout=False,
    )  # fmt: skip
    for end, reason, version in ((9, "abort", "3"), (15, "stop", "5")):
        meta = {
            "routed_experts": encode(whole.slice(0, end - 1), "sglang"),
            "output_token_logprobs": [(0.0, token) for token in range(len(sample.tokens) or 5, end)],
            "finish_reason": {"type": reason},
            "weight_version": version,
        }
        asyncio.run(answered(how, args, sample, {"text": "t", "meta_info": meta}))
        assert sample.tokens == list(range(end))
        sample.validate()
        assert np.array_equal(sample.rollout_routed_experts, slime.miles_sample(whole, end))
    assert sample.weight_versions == ["3", "5"]


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
            batch = micro_batch([sample(r, n, 4) for r, n in zip(map(versioned, routes), tokens, strict=True)])
            register = get_register_replay_list_func(manager)
            with mcore.rank_of():
                fill_replay_data()(actor, [batch], [1], batch.rollout_data, manager.data_key, replays, register)
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


def test_a_receipt_of_its_own_megatrons_routers() -> None:
    """Goal: miles' routers, manager and Megatron, unchanged. Method: a process of their own, because their Megatron has
    the other's name: micro-batches through miles' cut, in both stages, and what its routers then used."""
    here = Path(__file__).parent
    path = [Path(sys.prefix) / "apart", here, here.parents[2], here.parents[1] / "worlds"]
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", here / "miles_receipt.py"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["receipt", "39", "39", "gaps", "6", "6"]
