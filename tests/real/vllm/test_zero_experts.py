"""LongCat, whose routers may choose experts that compute nothing: rows name them, as transformers' routers do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import LATENT, prompts
from vllm.model_executor.layers.fused_moe.router import zero_expert_router

from bench.vllm_families import FAMILIES, make
from bench.vllm_zoo import answer_of, judged


def chosen(gating_output: torch.Tensor, topk: int, e_score_correction_bias: torch.Tensor, **_: Any) -> Any:
    scores = gating_output.softmax(-1)
    ids = (scores + e_score_correction_bias).topk(topk, -1).indices
    return scores.gather(1, ids), ids.to(torch.int32)


def passed_on(expert_indices: Any, expert_scales: Any, num_experts: int, hidden_states: Any, **_: Any) -> Any:
    return hidden_states * torch.where(expert_indices >= num_experts, expert_scales, 0).sum(-1, keepdim=True)


def test_rows_name_experts_that_compute_nothing(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: every row is what a trainer's router chooses, experts that compute nothing by their own ids. Method: all of
    vLLM's but two functions of its router, which GPUs alone have: the same arithmetic; four answers by transformers."""
    make("longcat_flash", tmp_path)
    monkeypatch.setattr(zero_expert_router, "fused_topk_bias", chosen)
    monkeypatch.setattr(zero_expert_router, "zero_experts_compute_triton", passed_on)
    running = engine(tmp_path, skip_tokenizer_init=True, **LATENT)
    answers = [answer_of(output) for output in running.ask(prompts(3, 9, 40, 70, 111))]
    verdict = judged(tmp_path, answers, "float32")
    due = sum(len(answer["tokens"]) - 1 for answer in answers)
    assert {name: verdict[name] for name in ("right", "close", "missing", "wrong")} == {
        "right": due,
        "close": 0,
        "missing": 0,
        "wrong": 0,
    }
    real = FAMILIES["longcat_flash"].text["n_routed_experts"]
    nothing = sum(int(np.count_nonzero(answer["ids"] >= real)) for answer in answers)
    assert nothing > due, "of four experts in each of two layers more than one a token"
