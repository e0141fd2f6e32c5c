"""What vLLM's sampler drew tokens from, in a client's hands: live, judged by transformers' logits.

Only Model Runner V2 says so, which runs on a CPU in Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import interpreter
import models
import numpy as np
import pytest
import torch
from engines import judge_tokens
from waiting import GIVE_UP_S

from bench.drawn_from import judged
from bench.harness import ROOT
from bench.vllm_support import NEW
from kvroute import RequestJournal, Routes, SamplingSupport, routing_spec

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def home(model: Callable[..., Path]) -> Path:
    return model("qwen3_moe")


@pytest.fixture(scope="module")
def answers(home: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By scenario, of an engine in a process of its own."""
    folder = tmp_path_factory.mktemp("drawing")
    backend = interpreter.written(folder / "backend")
    for place in (ROOT / ".venv").glob("lib/python3*/site-packages/triton*"):  # the project's own environment has it
        (backend / place.name).symlink_to(place)
    search = os.pathsep.join(map(str, (HERE, ROOT / "tests" / "worlds", backend, os.environ["PYTHONPATH"])))
    told = folder / "answers.json"
    subprocess.run(
        [sys.executable, "-m", "drawing", str(home), str(told)],
        env={**os.environ, **interpreter.ENVIRONMENT, "PYTHONPATH": search},
        check=True,
        timeout=GIVE_UP_S,
    )
    found: dict[str, Any] = json.loads(told.read_text())
    return found


SCENARIOS = ("plain", "prefix hits", "n = 2", "min-p", "top-k of one", "preempted", "a first turn", "a second turn")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_support_is_what_the_sampler_drew_from(home: Path, answers: dict[str, Any], scenario: str) -> None:
    """Goal: each token's support is the sampler's, and the log probability over it is the rollout's; prompts have none,
    whatever the prefix cache has. Method: transformers' logits of the same tokens, cut as vLLM documents its sampler;
    the routes beside them in one record, whose rows are judged, too."""
    if scenario == "preempted":
        assert answers["preemptions"] > 0
    if scenario in ("prefix hits", "a second turn"):
        assert max(answer["cached"] for answer in answers[scenario]) >= 32
    right = wrong = rows = 0
    for answer in answers[scenario]:
        assert answer["start"] == len(answer["prompt"])
        assert len(answer["counts"]) == len(answer["tokens"])
        found, missed, error = judged(models.reference(home), answer)
        right, wrong = right + found, wrong + missed
        assert error < 1e-3
        tokens = [*answer["prompt"], *answer["tokens"]]
        record = bytes.fromhex(answer["record"])
        support, routes = SamplingSupport.of_record(record), Routes.from_bytes(record)
        assert support is not None
        support.validate(tokens, loss_mask=[0] * support.start + [1] * len(support))
        assert (support.counts.tolist(), support.ids.tolist()) == (answer["counts"], answer["ids"])
        verdict = judge_tokens(home, tokens, routes)
        assert (verdict.missing, verdict.wrong) == (0, 0)
        rows += verdict.right
    print(f"\n{scenario}: {right} supports right, {wrong} wrong; {rows} rows right")
    assert wrong == 0
    assert right > 0.9 * sum(len(answer["tokens"]) for answer in answers[scenario])


def test_a_journal_has_the_draws_of_both_turns(answers: dict[str, Any]) -> None:
    """Goal: a rollout that goes on, over a prompt whose KV was hit, keeps what each of its tokens was drawn from.
    Method: both turns into a journal; each support beside the answer that it came with."""
    (first,), (second,) = answers["a first turn"], answers["a second turn"]
    journal = RequestJournal(routing_spec(16, 4, range(3), 3, block_tokens=32))
    for answer in (first, second):
        tokens = [*answer["prompt"], *answer["tokens"]]
        journal.settle(tokens)
        support = SamplingSupport.of_record(bytes.fromhex(answer["record"]))
        assert support is not None
        journal.record_support(support)
        journal.discard_unsettled()
    support = journal.support()
    drawn = [0] * len(tokens)
    for answer in (first, second):
        bounds = pairwise(accumulate(answer["counts"], initial=0))
        for i, (a, b) in enumerate(bounds):
            drawn[answer["start"] + i] = b - a
            assert support.row(answer["start"] + i).tolist() == answer["ids"][a:b]
    assert support.counts.tolist() == drawn
    assert np.count_nonzero(drawn) == 2 * NEW


def test_the_judge_finds_a_shifted_and_a_cut_support(home: Path, answers: dict[str, Any]) -> None:
    """Goal: the judge is one. Method: supports that are those of the token before, and one without its last id."""
    answer = next(a for a in answers["plain"] if len(set(a["counts"])) > 1)
    bounds = list(pairwise(accumulate(answer["counts"], initial=0)))
    rows = [answer["ids"][a:b] for a, b in bounds]
    shifted = [*rows[-1:], *rows[:-1]]
    counts, ids = [len(row) for row in shifted], [i for row in shifted for i in row]
    assert judged(models.reference(home), {**answer, "counts": counts, "ids": ids})[1] > 0
    cut = [row[:-1] or row for row in rows]
    counts, ids = [len(row) for row in cut], [i for row in cut for i in row]
    assert judged(models.reference(home), {**answer, "counts": counts, "ids": ids, "logprobs": [0.0] * len(cut)})[1] > 0
    assert torch.get_num_threads() >= 1
