"""The far end of an OpenAI server: answers, lists of prompts, streams, as clients have them, at every trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from engines import prompts
from far_judge import Judge, Tally
from test_server import serving

from kvroute.integrations.vllm import gathered, routes
from kvroute.rollout import RolloutStore, open_rollouts

PATH = "/v1/completions"
SAMPLED: dict[str, Any] = {"temperature": 1.0, "max_tokens": 80, "stop": ["33", "05", "77", "20"]}


def of_all(judge: Judge, answers: Sequence[Mapping[str, Any]], rollouts: RolloutStore) -> Tally:
    """Of every choice of every answer: its routes, asked for at once."""
    found = Tally()
    for answer in answers:
        for choice in answer["choices"]:
            rows = routes(answer, choice["index"], rollouts=rollouts)
            prompt = answer.get("prompt_token_ids") or choice["prompt_token_ids"]
            found += judge.judge({"prompt": prompt, "completions": [{"tokens": choice["token_ids"]}]}, routes=rows)
    return found


@pytest.mark.timeout(900)
def test_what_clients_of_a_server_have(model: Callable[..., Path], tmp_path: Path) -> None:
    """Goal: rows are of the answer's own tokens, whichever way it came. Method: the same X-Request-Id twice with other
    prompts and stop strings, a list of prompts with two completions each, streams; every row by transformers.
    """
    home, where = model("qwen3_moe_dense_first"), f"file://{tmp_path}/rollouts"
    judge = Judge({"A": home})
    with serving(home, tmp_path, tmp_path / "server.log", where) as server, closing(open_rollouts(where)) as left:
        found = Tally()
        for seed, prompt in enumerate(prompts(95, *[40] * 6)):
            answer = server.post(PATH, request_id=f"again-{seed % 2}", prompt=prompt, seed=seed, **SAMPLED)
            found += of_all(judge, [answer], left)
        answer = server.post(PATH, prompt=prompts(96, 40, 70, 100), n=2, seed=1, **SAMPLED)
        assert len(answer["choices"]) == 6
        found += of_all(judge, [answer], left)
        for seed, prompt in enumerate(prompts(97, 40, 70)):
            answer = gathered(server.stream(PATH, prompt=prompt, n=seed + 1, seed=seed, **SAMPLED))
            found += of_all(judge, [answer], left)
    print(f"\nserver: {found}")
    assert not found.wrong, found
    assert found.answers == 15
    assert found.right == found.due
