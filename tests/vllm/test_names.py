"""Names of requests that come again, in vLLM's own processes: the front end answers before the engine knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from engines import Verdict, prompts
from test_server import Server, right, serving
from vllm import SamplingParams

import kvroute
from kvroute.integrations.vllm import gathered, routes
from kvroute.rollout import RolloutStore, open_rollouts

STOPS = [f"t{i}" for i in range(5, 500, 8)]
SAMPLED: dict[str, Any] = {"temperature": 1.0, "max_tokens": 40, "stop": STOPS}


@pytest.fixture
def left(tmp_path: Path) -> Iterator[RolloutStore]:
    with closing(open_rollouts(f"file://{tmp_path}/rollouts")) as store:
        yield store


def ended(engine: Any, name: str, prompt: list[int], **sampling: Any) -> Any:
    """The answer to a request that its caller gives a name."""
    core, sampling = engine.llm.llm_engine, {"ignore_eos": True, **sampling}
    core.add_request(name, {"prompt_token_ids": prompt}, SamplingParams(**sampling))
    done: list[Any] = []
    while core.has_unfinished_requests():
        done += [each for each in core.step() if each.finished]
    assert [each.request_id for each in done] == [name]
    return done[0]


@pytest.mark.timeout(900)
def test_ids_that_come_again_have_their_own_rows(
    engine: Any, model: Callable[..., Path], left: RolloutStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: no row of another request, with stop strings, whose answers have no handle. Method: ``LLM`` counts from 0
    again after a restart; a caller's names in two epochs, several completions; names that look like a child's.
    """
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    home, stopped = model("qwen3_moe"), 0

    def all_right(output: Any) -> int:
        for each in output.outputs:
            found = started.judge(output, each.index, rollouts=left)
            assert found == Verdict(found.due, found.due, 0, 0), (output.request_id, each.index, found)
        return sum(each.finish_reason == "stop" for each in output.outputs)

    for run in (0, 1):
        started = engine(home, settings={"rollouts": f"file://{tmp_path}/rollouts"})
        for prompt in prompts(60 + run, *[40] * 6):
            (output,) = started.ask([prompt], **SAMPLED)
            assert output.kv_transfer_params is None or output.outputs[0].finish_reason == "length"
            stopped += all_right(output)
        assert output.request_id == "5"
    for epoch in (0, 1):
        asked = prompts(70 + epoch, *[40] * 4)
        for i, prompt in enumerate(asked):
            stopped += all_right(ended(started, f"sample-{i}", prompt, **SAMPLED))
        stopped += all_right(ended(started, "several", asked[0], **SAMPLED, n=3))
        for name in ("5_1", "12_7_0", "0_1", "2026_step", "7_abc-12345678"):
            assert all_right(ended(started, name, asked[1], temperature=1.0, max_tokens=5)) == 0
            stopped += all_right(ended(started, name, asked[2], **SAMPLED))
    assert stopped > 20, "requests that the front end has ended"


def word_of(answer: dict[str, Any], at: int) -> str:
    return f"t{answer['choices'][0]['token_ids'][at]}"


def no_rows(answer: dict[str, Any], index: int, why: str, **where: Any) -> None:
    with pytest.raises(kvroute.RowError, match=why):
        routes(answer, index, **where)


def lists(server: Server, home: Path, store: RolloutStore) -> int:
    """Lists of prompts, each with one completion and two, with a stop string and without: how many rows were right."""
    asked, found = prompts(81, 40, 50, 45), 0
    for n in (1, 2):
        for stop in (None, STOPS):
            body = {"prompt": asked, "n": n, "max_tokens": 20, "temperature": 1.0, "seed": 5, "stop": stop}
            answer = server.post("/v1/completions", **body)
            assert len(answer["choices"]) == 3 * n
            found += sum(right(home, answer, i, rollouts=store) for i in range(3 * n))
            kept = {**answer, "choices": answer["choices"][-1:], "kv_transfer_params": None}
            assert right(home, kept, 3 * n - 1, rollouts=store) > 45
            no_rows(kept, 0, "index", rollouts=store)
            no_rows(answer, n, f"completion {n} .*cmpl-.*-1.*rollouts=")  # of the second prompt
    return found


def streams(server: Server, home: Path, store: RolloutStore) -> int:
    """Streams of completions and chats: how many rows were right."""
    (asked,) = prompts(82, 40)
    several = {"max_tokens": 16, "n": 2, "temperature": 1.0, "seed": 9}
    said, found = {"messages": [{"role": "user", "content": " ".join(f"t{i}" for i in asked)}]}, 0
    for path, body in (
        ("/v1/completions", {"prompt": asked, "max_tokens": 16}),
        ("/v1/completions", {"prompt": asked, **several, "stream_options": {"include_usage": True}}),
        ("/v1/completions", {"prompt": [asked, asked[:9]], **several, "stop": STOPS}),
        ("/v1/chat/completions", {**said, "max_tokens": 16, "stream_options": {"include_usage": True}}),
        ("/v1/chat/completions", {**said, **several, "stop": STOPS}),
    ):
        chunks = server.stream(path, **body)
        for each in (chunks[0], chunks[-2], chunks[-1]):
            no_rows(each, 0, "gathered", rollouts=store, wait_s=60)
        answer = gathered(chunks)
        found += sum(right(home, answer, each["index"], rollouts=store) for each in answer["choices"])
        no_rows(answer, 0, "rollouts=")
    whole = server.post("/v1/chat/completions", **said, **several)
    return found + sum(right(home, whole, i, rollouts=store) for i in (0, 1))


def responses(server: Server, home: Path, store: RolloutStore) -> None:
    """``/v1/responses`` has the engine's own binding, or the tokens where they are asked for."""
    asked = {"input": " ".join(f"t{i}" for i in range(9, 60)), "max_output_tokens": 8}
    more = {"ignore_eos": None, "return_token_ids": None}
    answer = server.post("/v1/responses", **asked, **more, enable_response_messages=True)
    tokens = [*answer["input_messages"][0]["tokens"], *answer["output_messages"][0]["tokens"]]
    for each in (answer, {**answer, "input_messages": None}, {**answer, "kv_transfer_params": None}):
        if each["input_messages"] or each["kv_transfer_params"]:
            found = routes(each, rollouts=store)
            found.validate(tokens, rows=len(tokens) - 1)
            assert (np.sort(found.ids.astype(np.int64), axis=-1) == models.routing(home, tokens)[: len(found)]).all()
    no_rows(
        {**answer, "input_messages": None, "kv_transfer_params": None}, 0, "enable_response_messages", rollouts=store
    )


@pytest.mark.timeout(900)
def test_a_server_s_answers_have_their_own_rows(model: Callable[..., Path], left: RolloutStore, tmp_path: Path) -> None:
    """Goal: every choice of every kind of answer, under ids that clients choose. Method: one id for two requests,
    before and after a SIGKILL of the server; lists of prompts, streams and responses; every row against transformers.
    """
    home, where = model("qwen3_moe"), f"file://{tmp_path}/rollouts"
    for run in (0, 1):
        with serving(home, tmp_path / f"{run}", tmp_path / f"{run}.log", where) as server:
            for prompt in prompts(90 + run, 60, 60):
                whole = server.post("/v1/completions", prompt=prompt, max_tokens=20)
                body = {"prompt": prompt, "max_tokens": 20}
                for n, more in ((1, {"stop": [word_of(whole, 6)]}), (2, {"stop": STOPS, "temperature": 1.0})):
                    answer = server.post("/v1/completions", "the-client-s-own", **body, n=n, **more)
                    assert answer["id"] == "cmpl-the-client-s-own"
                    assert all(right(home, answer, i, rollouts=left) <= (66 if n == 1 else 79) for i in range(n))
            if run == 0:
                assert lists(server, home, left) > 1000
                assert streams(server, home, left) > 300
                responses(server, home, left)
