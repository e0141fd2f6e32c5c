"""Speculative decoding, in a process of its own: its proposer loads numba, after which a process can make no other
engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from engines import Verdict, judge_tokens, prompts
from far_start import HOST, Engines, ask

import kvroute


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
