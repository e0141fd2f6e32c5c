"""vLLM's own field from engines that run ahead of their worker, in processes of their own, as beside a device.

Outputs wait on a thread of the engine's process until their rows are there. The tests of ``test_far_end`` judge the
field, too, where rows are there when outputs are.
"""

from __future__ import annotations

import pytest
from engines import prompts
from far_judge import Judge, of_all, verdict
from far_start import STOPS, Engine, Engines, ask, stopped

SMALL = {"num_gpu_blocks_override": 16, "max_model_len": 256, "max_num_batched_tokens": 96}


def rollout(engine: Engine, seed: int) -> list[dict[str, object]]:
    """Answers that stop strings end, of prompts asked at once and twice over, two completions each.

    Without a seed: vLLM cannot save a seeded generator on a CPU, which it does when it preempts a request ahead.
    """
    asks = [{**each, "sampling": {**each["sampling"], "n": 2, "seed": None}} for each in stopped(seed, count=8)]
    answers = [*engine.do(asks), *engine.do(asks)]
    ends = [each["ended"] for answer in answers for each in answer["completions"]]
    assert sum(end in STOPS for end in ends) > len(ends) // 2
    return answers


@pytest.mark.parametrize("rollouts", ["", "response:"])
def test_outputs_wait_for_rows_that_come_later(start: Engines, judge: Judge, rollouts: str) -> None:
    """Goal: every answer has its rows, though the worker writes them behind the outputs. Method: stop strings, two
    completions of a prompt, prefix hits, requests that are aborted, more requests than there are blocks; with routes in
    the response beside the field, and without."""
    engine = start("KvrouteConnector", {"rollouts": rollouts}, ahead=True, **SMALL)
    answers = rollout(engine, 81)
    asked = [ask(f"wave-{i}", prompt, max_tokens=80) for i, prompt in enumerate(prompts(82, *[40] * 12))]
    aborted = [["abort", {"name": f"wave-{i}"}] for i in range(0, 12, 3)]
    cut, _ = engine.do(asked, aborted, after=1)
    assert {each["completions"][0]["ended"] for each in cut} == {"abort", "length"}
    answers += [*cut, *engine.do(asked)]
    assert engine.counter("num_preemptions") > 0
    with verdict("ahead", of_all(judge, answers)) as tally:
        due = sum(len(each["prompt"]) + len(one["tokens"]) - 1 for each in answers for one in each["completions"])
        assert (tally.fields, tally.fieldless) == (due * 3, 0)


def test_an_update_amid_answers(start: Engines, judge: Judge) -> None:
    """Goal: a row is of the weights that its token was sampled with. Method: weights are swapped in place while
    requests run, with the cache kept, and with the cache cleared."""
    engine = start("KvrouteConnector", {"rollouts": ""}, ahead=True)
    now, then = "A", "B"
    ways = {
        "cache kept": ([["pause", {"mode": "keep", "clear_cache": False}]], [["resume", {}]]),
        "cache cleared": ([["pause", {"mode": "keep", "clear_cache": True}]], [["resume", {}]]),
    }
    for number, (what, (first, last)) in enumerate(ways.items()):
        asked = prompts(83 + number, 40, 70, 100, 33)
        asks = [ask(f"{number}-{i}", prompt, max_tokens=60) for i, prompt in enumerate(asked)]
        acts = [*first, ["swap", {"home": str(judge.weights[then].home)}], *last]
        answers, _ = engine.do(asks, acts, after=8)
        with verdict(what, of_all(judge, answers, now, then)) as tally:
            assert (tally.fields, tally.fieldless) == (tally.due, 0)
        engine.do(acts=[["reset", {"reset_connector": True}]])
        now, then = then, now
