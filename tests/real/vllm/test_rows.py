"""Every row of every request equals transformers' own, whatever vLLM does with the request and its blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import BLOCK, Engine, Verdict, judge, judge_tokens, keyed, prompts
from vllm import SamplingParams
from vllm.v1.request import RequestStatus
from waiting import until

import kvroute
from kvroute.connector.key import rollout_id
from kvroute.integrations.vllm import choice_key, routes
from kvroute.rollout import open_rollouts


@pytest.fixture(scope="module")
def qwen(model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One engine for the tests that change nothing for each other: each has prompts of its own."""
    where = f"file://{tmp_path_factory.mktemp('rollouts')}"
    engine = Engine(model("qwen3_moe"), settings={"rollouts": where})
    engine.rollouts = open_rollouts(where)
    yield engine
    engine.rollouts.close()
    engine.close()


def all_right(engine: Engine, outputs: list[Any]) -> None:
    engine.assert_right(outputs, rollouts=engine.rollouts)


def test_plain_batches(qwen: Engine) -> None:
    """Goal: rows of requests of many lengths in one batch. Method: lengths around the ends of blocks."""
    all_right(qwen, qwen.ask(prompts(1, 1, 10, 31, 32, 33, 64, 65, 150)))


def test_prefix_hits_bring_rows(qwen: Engine) -> None:
    """Goal: a cached block has its rows. Method: the same prompts twice; the second time they hit."""
    asked = prompts(2, 10, 33, 1, shared=100)
    all_right(qwen, qwen.ask(asked))
    again = qwen.ask(asked)
    assert min(output.num_cached_tokens for output in again) >= 96
    all_right(qwen, again)


def test_hits_of_the_same_step(qwen: Engine) -> None:
    """Goal: requests may share blocks that are computed in that very step. Method: one new prefix, four at once."""
    outputs = qwen.ask(prompts(3, 5, 6, 7, 8, shared=96))
    assert sum(output.num_cached_tokens for output in outputs) >= 3 * 96
    all_right(qwen, outputs)


def test_turns_that_hit_generated_blocks(qwen: Engine) -> None:
    """Goal: rows of sampled tokens are hit like those of prompts, and are sent to a client once. Method: answer and
    question go back twice, with the first position whose row the client lacks; what came is put together."""
    asked, there = prompts(4, 50, 50), list[Any]()
    for _ in range(3):
        start = there[0].stop if there else 0
        outputs = qwen.ask(asked, max_tokens=40, extra_args={"kv_transfer_params": {"kvroute": {"start": start}}})
        came = [routes(output, rollouts=qwen.rollouts) for output in outputs]
        assert [found.start for found in came] == [start, start]
        there = [old.merge(new) for old, new in zip(there, came, strict=True)] if there else came
        for output, found in zip(outputs, there, strict=True):
            due = len(output.prompt_token_ids) + 39
            assert judge(qwen.home, output, found) == Verdict(due, due, 0, 0)
        asked = [[*p, *o.outputs[0].token_ids, 7, 8, 9] for p, o in zip(asked, outputs, strict=True)]
    assert outputs[0].num_cached_tokens >= 4 * BLOCK


def test_several_completions_of_a_prompt(qwen: Engine) -> None:
    """Goal: n > 1. Method: sampled completions differ, each has the rows of its own tokens."""
    outputs = qwen.ask(prompts(5, 40, 64), n=3, temperature=1.0, seed=1)
    assert len({tuple(each.token_ids) for each in outputs[0].outputs}) == 3
    all_right(qwen, outputs)


def test_stop_strings(qwen: Engine) -> None:
    """Goal: rows of a request that the front end ends. Method: a stop string that greedy decoding is known to say."""
    (asked,) = prompts(6, 45)
    (whole,) = qwen.ask([asked])
    word = f"t{whole.outputs[0].token_ids[7]}"
    (stopped,) = qwen.ask([asked], stop=[word], **keyed("stops"))
    assert stopped.outputs[0].stop_reason == word
    assert len(stopped.outputs[0].token_ids) <= 8
    assert stopped.kv_transfer_params is None
    qwen.assert_right([stopped], rollouts=qwen.rollouts, key="stops")


def answered(core: Any, outputs: int) -> None:
    """Step until there were so many outputs."""
    while outputs:
        outputs -= bool(core.step())


def test_an_aborted_request_leaves_nothing_wrong(qwen: Engine) -> None:
    """Goal: abort in prefill and in decode. Method: abort after steps; check its rows, and those of requests that hit
    its blocks; without a key nothing is left, for nobody could find it."""
    core, asked = qwen.llm.llm_engine, prompts(7, 100, 60)
    for name, prompt, steps in (("gone-1", asked[0], 1), ("gone-2", asked[1], 9)):
        sampling = SamplingParams(temperature=0, max_tokens=99, ignore_eos=True, **keyed(name))
        core.add_request("gone", {"prompt_token_ids": prompt}, sampling)
        answered(core, steps)
        core.abort_request(["gone"])
        place = rollout_id(name, prompt)
        until(lambda place=place: qwen.rollouts.find(place))
        left = qwen.rollouts.find(place)
        assert left.rows == len(prompt) + steps - 1
    before = set(qwen.rollouts.directory.iterdir())
    core.add_request("no-key", {"prompt_token_ids": asked[0]}, SamplingParams(temperature=0, max_tokens=99))
    answered(core, 2)
    core.abort_request(["no-key"])
    outputs = qwen.ask(asked)
    all_right(qwen, outputs)
    assert len(set(qwen.rollouts.directory.iterdir()) - before) == len(outputs), "of a request without a key none"


def test_a_request_that_ends_in_an_error_leaves_its_rows(qwen: Engine) -> None:
    """Goal: rows that were computed can be had, however a request ends. Method: vLLM's scheduler ends one as it does
    when KV has failed to load, after steps."""
    core, (asked,) = qwen.llm.llm_engine, prompts(12, 60)
    sampling = SamplingParams(temperature=0, max_tokens=99, ignore_eos=True, **keyed("a-failure"))
    core.add_request("failed", {"prompt_token_ids": asked}, sampling)
    answered(core, 5)
    (request,) = core.engine_core.engine_core.scheduler.requests.values()
    tokens = list(request.all_token_ids)
    core.engine_core.engine_core.scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_ERROR)
    core.abort_request(["failed"])
    place = rollout_id("a-failure", asked)
    until(lambda: qwen.rollouts.find(place))
    found = qwen.rollouts.get(qwen.rollouts.find(place))[0]
    assert judge_tokens(qwen.home, tokens[: found.stop + 1], found).right == len(asked) + 5 - 1


@pytest.mark.parametrize(
    ("asked_for", "why"),
    [
        ({"strat": 1}, "kvroute: wanted a mapping with start or key, got"),
        (7, "kvroute: wanted a mapping with start or key, got"),
        ({"key": "a b"}, "kvroute.key: wanted 1 to 128 letters and digits"),
    ],
)
def test_a_request_that_asks_for_what_there_is_not_is_told(qwen: Engine, asked_for: Any, why: str) -> None:
    """Goal: a misspelt option is an error in the answer. Method: another name than there is, no mapping, and a key that
    is none."""
    (output,) = qwen.ask(prompts(13, 20), extra_args={"kv_transfer_params": {"kvroute": asked_for}})
    with pytest.raises(kvroute.RowError, match=why):
        routes(output, rollouts=qwen.rollouts)


def test_completions_of_a_prompt_have_keys_of_their_own(qwen: Engine) -> None:
    """Goal: each of several completions is found, though all have the same tokens. Method: the likeliest tokens,
    a key, and an answer without its handles; the key without a number finds nothing."""
    (output,) = qwen.ask(prompts(14, 40), n=3, temperature=1.0, top_k=1, **keyed("several"))
    assert len({tuple(choice.token_ids) for choice in output.outputs}) == 1
    output.kv_transfer_params = None
    for choice in output.outputs:
        key = choice_key("several", choice.index)
        found = judge(qwen.home, output, routes(output, choice.index, rollouts=qwen.rollouts, key=key), choice.index)
        assert found == Verdict(59, 59, 0, 0)
    with pytest.raises(kvroute.RowError, match="under the key several within"):
        routes(output, rollouts=qwen.rollouts, key="several", wait_s=0)


def test_a_key_that_is_used_again_finds_nothing(qwen: Engine) -> None:
    """Goal: nobody gets another request's rows. Method: one prompt twice with one key and one id; the handles, and the
    key alone."""
    outputs = [qwen.ask(prompts(15, 40), **keyed("again"))[0] for _ in range(2)]
    all_right(qwen, outputs[1:])
    for output in outputs:
        output.kv_transfer_params = None
        with pytest.raises(kvroute.RowError, match="a key that no other request has had"):
            routes(output, rollouts=qwen.rollouts, key="again", wait_s=60)


def test_log_probabilities_of_a_prompt(qwen: Engine) -> None:
    """Goal: a request for which vLLM does not take a connector's hits has its rows. Method: the same prompt twice, the
    second time with log probabilities."""
    (asked,) = prompts(11, 50)
    for logprobs in (None, 1):
        all_right(qwen, qwen.ask([asked], max_tokens=8, prompt_logprobs=logprobs))


def test_rows_that_were_lost_are_missing(qwen: Engine) -> None:
    """Goal: a row that was not captured is missing, and not replaced. Method: in two steps the router of
    one layer says ids twice, of which nobody knows which count."""
    again = qwen.kept.ids.hook(1)
    take, steps = qwen.kept.ids.take, iter(range(99))

    def forgets(tokens: int) -> Any:
        if next(steps) in (0, 5):
            again(torch.zeros(tokens, 4, dtype=torch.int32))
        return take(tokens)

    qwen.kept.ids.take = forgets
    try:
        (output,) = qwen.ask(prompts(8, 40))
    finally:
        qwen.kept.ids.take = take
    found = judge(qwen.home, output, routes(output, rollouts=qwen.rollouts))
    assert found == Verdict(found.due, found.due - 41, 41, 0)
    assert sum(qwen.kept.missing.values()) == 41


def test_ids_that_no_router_chooses_are_missing(qwen: Engine) -> None:
    """Goal: a kernel that answers zeros is detected. Method: one step's ids of all layers become zeros."""
    take, steps = qwen.kept.ids.take, iter(range(99))

    def zeros(tokens: int) -> Any:
        ids = take(tokens)
        return torch.zeros_like(ids) if next(steps) == 0 else ids

    qwen.kept.ids.take = zeros
    try:
        (output,) = qwen.ask(prompts(9, 40))
    finally:
        qwen.kept.ids.take = take
    found = judge(qwen.home, output, routes(output, rollouts=qwen.rollouts))
    assert found == Verdict(found.due, found.due - 40, 40, 0)


def test_a_reset_makes_every_row_unreadable(qwen: Engine) -> None:
    """Goal: nothing older is read after a reset. Method: a reset; hits are gone, and what is computed has its rows."""
    (asked,) = prompts(10, 80)
    all_right(qwen, qwen.ask([asked]))
    blocks = np.arange(64)
    before = qwen.sent.view.read("routing", blocks, generations=qwen.sent.feed.generations[blocks]).valid
    assert before.any()
    assert qwen.llm.llm_engine.engine_core.reset_prefix_cache(False, True)
    assert not qwen.sent.view.read("routing", blocks, generations=qwen.sent.feed.generations[blocks]).valid.any()
    (output,) = qwen.ask([asked])
    assert output.num_cached_tokens == 0
    all_right(qwen, [output])
    assert routes(output, rollouts=qwen.rollouts).weights_versions == (), "nobody gave one"


def test_kvroute_is_not_loaded_for_clients() -> None:
    """Goal: a client needs neither vLLM nor torch. Method: the modules that a fresh interpreter has loaded."""
    import subprocess
    import sys

    code = "import sys, kvroute.integrations.vllm as v; v.routes; print({'vllm', 'torch'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
    assert kvroute.__version__
