"""Speculative decoding, in a process of its own: its proposer loads numba, after which a process can make no other
engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import BLOCK, LATENT, Verdict, judge_tokens, prompts
from far_start import HOST, Engines, ask
from mtp_judge import let_both_tokens_count, mtp_routing

import kvroute
from bench.vllm_drafts import drafted
from kvroute.connector.mtp import READ_OTHERWISE
from kvroute.integrations.vllm import mtp_missing, mtp_routes

KINDS = {"model": "qwen3_moe", "eagle3": "qwen3_moe", "mtp": "glm4_moe", "latent": "deepseek_v3"}
"""Each kind of drafts, and the model that is drafted for."""
ELSE = 7
"""The token with which turns go on otherwise."""


@pytest.mark.parametrize("offloads", [False, True])
def test_rejected_drafts_leave_no_rows(model: Callable[..., Path], tmp_path: Path, offloads: bool) -> None:
    """Goal: speculative decoding. Method: drafts from the prompt's own repetitions, some are rejected; the rows
    of the tokens that took their places, and of requests that hit their blocks, in the pool or, in a pool of one
    request, on the host.
    """
    home = model("qwen3_moe")
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    asked = [prompt * 6 for prompt in prompts(45, 9, 12, 15)]

    def all_right(answers: list[dict[str, Any]]) -> list[list[int]]:
        told = [[*answer["prompt"], *answer["completions"][0]["tokens"]] for answer in answers]
        for tokens, answer in zip(told, answers, strict=True):
            found = judge_tokens(home, tokens, kvroute.Routes.from_json(answer["completions"][0]["routes"]))
            assert found == Verdict(len(tokens) - 1, len(tokens) - 1, 0, 0)
        return told

    with closing(Engines({"A": home}, tmp_path)) as start:
        around: tuple[Any, ...] = ("KvrouteConnector", {})
        few: dict[str, Any] = {}
        if offloads:
            around = ("KvrouteOffloadingConnector", {}, {**HOST, "offload_prompt_only": False})
            few = {"num_gpu_blocks_override": 9, "max_model_len": 256}
        made = start(*around, front="LLM", speculative_config=drafts, **few)
        told = all_right(made.do([ask("", prompt, max_tokens=60) for prompt in asked]))
        assert made.counter("spec_decode_num_draft_tokens") > made.counter("spec_decode_num_accepted_tokens")
        all_right(made.do([ask("", [*tokens, 7]) for tokens in told]))
        assert (made.counter("external_prefix_cache_hits") > 0) == offloads


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_models_beside_drafts_of_any_kind(model: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    """Goal: a draft model's choices are in nobody's rows. Method: drafts of a model with the same layers, of a dense
    head, and of MTP layers behind the model's; some are rejected. A pool for two of three requests, so that one is
    preempted; then turns that hit blocks which drafts have filled, beside prompts that go on otherwise there. Every row
    is that of the tokens that stand, in the answer's routes and in vLLM's own field.
    """
    home, speculative = drafted("mtp" if kind == "latent" else kind, model(KINDS[kind]), tmp_path / "draft")
    settings: dict[str, Any] = {}
    if kind in ("mtp", "latent"):
        settings = {"mtp": True}
        let_both_tokens_count(home)
    with closing(Engines({"A": home}, tmp_path)) as start:
        few = {"num_gpu_blocks_override": 13, "max_model_len": 192, **(LATENT if kind == "latent" else {})}
        made = start("KvrouteConnector", settings, front="LLM", speculative_config=speculative, **few)
        asks = [ask("", prompt, max_tokens=60) for prompt in prompts(46, 80, 90, 100)]
        earlier: list[list[int]] = []  # what each ask begins like
        unread = 0  # rows of an MTP layer that a hit has not
        for _ in range(2):
            answers = made.do(asks)
            for number, answer in enumerate(answers):
                completion = answer["completions"][0]
                tokens = [*answer["prompt"], *completion["tokens"]]
                found = judge_tokens(model(KINDS[kind]), tokens, kvroute.Routes.from_json(completion["routes"]))
                assert found == Verdict(len(tokens) - 1, len(tokens) - 1, 0, 0)
                assert completion["own_field"]["shape"][0] == len(tokens) - 1
                if settings:
                    unread += assert_mtp_rows_right(home, answer, tokens, earlier[number] if earlier else tokens)
            told = [[*answer["prompt"], *answer["completions"][0]["tokens"]] for answer in answers]
            asks = [ask("", [*tokens[:length], ELSE], max_tokens=9) for tokens in told for length in (64, 96, 128)]
            earlier = [tokens for tokens in told for _ in range(3)]
        if kind != "latent":  # for which vLLM has no prefix cache on a CPU
            assert made.counter("prefix_cache_hits") > 0
            assert made.counter("num_preemptions") > 0
            assert (unread > 0) == (kind == "mtp")
        taken = made.counter("spec_decode_num_accepted_tokens")
        assert (kind == "model") <= taken < made.counter("spec_decode_num_draft_tokens")


def assert_mtp_rows_right(home: Path, answer: dict[str, Any], tokens: list[int], earlier: list[int]) -> int:
    """Every row of the draft's MTP layer is that of transformers' pass over both tokens of each; how many are missing.

    Behind a block of a hit the layer does not read the block's last token again. Its KV goes on with what was read
    then: :data:`ELSE`, or what the ``earlier`` answer has there. If that is another token, the row is missing.
    """
    (completion,) = answer["completions"]
    choice = {"index": 0, "prompt_token_ids": answer["prompt"], "token_ids": completion["tokens"]}
    output = {"kv_transfer_params": answer["params"], "choices": [choice]}
    rows, gaps, read = mtp_routes(output), mtp_missing(output), tokens[1:]
    assert [list(gap[:2]) for gap in gaps] == [list(gap) for gap in rows.missing]
    for start, stop, why in gaps:
        assert (stop - start, stop % BLOCK, why) == (1, 0, READ_OTHERWISE)
        assert stop <= answer["cached"]
        read[start] = earlier[stop] if tokens[stop] == ELSE else ELSE
        assert read[start] != tokens[stop]
    assert (rows.start, len(rows)) == (0, len(tokens) - 1)
    same = np.sort(rows.ids.astype(np.int64), axis=-1) == mtp_routing(home, tokens[:-1], read)
    assert same.all(axis=(1, 2))[rows.valid].all()
    return len(gaps)
