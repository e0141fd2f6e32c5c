"""Speculative decoding, in a process of its own: its proposer loads numba, after which a process can make no other
engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from engines import LATENT, Verdict, judge_tokens, prompts
from far_start import HOST, Engines, ask

import kvroute
from bench.vllm_drafts import drafted

KINDS = {"model": "qwen3_moe", "eagle3": "qwen3_moe", "mtp": "glm4_moe", "latent": "deepseek_v3"}
"""Each kind of drafts, and the model that is drafted for."""


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
    with closing(Engines({"A": home}, tmp_path)) as start:
        few = {"num_gpu_blocks_override": 13, "max_model_len": 192, **(LATENT if kind == "latent" else {})}
        made = start("KvrouteConnector", {}, front="LLM", speculative_config=speculative, **few)
        asks = [ask("", prompt, max_tokens=60) for prompt in prompts(46, 80, 90, 100)]
        for _ in range(2):
            answers = made.do(asks)
            for answer in answers:
                completion = answer["completions"][0]
                tokens = [*answer["prompt"], *completion["tokens"]]
                found = judge_tokens(model(KINDS[kind]), tokens, kvroute.Routes.from_json(completion["routes"]))
                assert found == Verdict(len(tokens) - 1, len(tokens) - 1, 0, 0)
                assert completion["own_field"]["shape"][0] == len(tokens) - 1
            told = [[*answer["prompt"], *answer["completions"][0]["tokens"]] for answer in answers]
            asks = [ask("", [*tokens[:length], 7], max_tokens=9) for tokens in told for length in (64, 96, 128)]
        if kind != "latent":  # for which vLLM has no prefix cache on a CPU
            assert made.counter("prefix_cache_hits") > 0
            assert made.counter("num_preemptions") > 0
        taken = made.counter("spec_decode_num_accepted_tokens")
        assert (kind == "model") <= taken < made.counter("spec_decode_num_draft_tokens")
