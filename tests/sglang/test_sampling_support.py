"""What SGLang's sampler drew tokens from, in a client's hands: live, judged by transformers' logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from test_scenarios import SMALL, prompts

from bench.drawn_from import judged
from kvroute import Routes, SamplingSupport

Serve = Callable[..., list[dict[str, Any]]]
CUT = {"temperature": 0.5, "top_k": 12, "top_p": 0.6}
FIRST = prompts(51, 70, 40, 33)
DO: list[Any] = [
    ["plain", "draw", {"prompts": FIRST, "sampling": CUT}],
    ["prefix hits", "draw", {"prompts": FIRST, "sampling": CUT}],
    ["min-p", "draw", {"prompts": FIRST[:2], "sampling": {**CUT, "top_p": 1.0, "min_p": 0.3}}],
    ["top-k of one", "draw", {"prompts": FIRST[:2], "sampling": {"temperature": 0.5, "top_k": 1}}],
    ["retracted", "draw", {"prompts": prompts(52, 70, 70, 70, 70), "sampling": CUT, "new": 90}],
]


@pytest.mark.timeout(900)
def test_a_support_is_what_the_sampler_drew_from(serve: Serve, model: Callable[..., Path], tmp_path: Path) -> None:
    """Goal: each token's support is the sampler's, and the log probability over it is the rollout's; prompts have none,
    whatever the radix cache has. Method: transformers' logits of the same tokens, cut as SGLang cuts them; the routes
    beside them in one record, whose rows are judged, too. Four requests of 160 tokens retract each other in a pool of
    512."""
    home = model("qwen3_moe")
    answers = serve(home, DO, settings={"rollouts": f"file://{tmp_path}/rollouts", "strict": True}, **SMALL)
    found = dict[str, np.ndarray]()
    for answer in answers:
        tokens = [*answer["prompt"], *answer["tokens"]]
        assert answer["start"] == len(answer["prompt"])
        assert len(answer["counts"]) == len(answer["tokens"])
        right, wrong, error = judged(models.reference(home), answer, joint=True)
        assert error < 1e-3, answer["scenario"]
        record = bytes.fromhex(answer["record"])
        support, routes = SamplingSupport.of_record(record), Routes.from_bytes(record)
        assert support is not None
        support.validate(tokens, loss_mask=[0] * support.start + [1] * len(support))
        rows = (np.sort(routes.ids, axis=-1) == models.routing(home, tokens)[: len(routes)]).all((1, 2))
        assert routes.complete
        counts = np.array([right, wrong, len(answer["tokens"]), int(rows.sum()), len(rows), answer["hits"]])
        found[answer["scenario"]] = found.get(answer["scenario"], np.zeros(6, int)) + counts
    print("\nscenario: supports right, wrong, of tokens; rows right, of; hits")
    for scenario, counts in found.items():
        print(f"{scenario}: {counts.tolist()}")
        right, wrong, tokens_drawn, rows_right, rows_due, _ = counts.tolist()
        assert (wrong, rows_right) == (0, rows_due), scenario
        assert right > 0.9 * tokens_drawn, scenario
    assert found["prefix hits"][5] >= 3 * 32
