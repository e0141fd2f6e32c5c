"""The far end: the rows that a trainer gets from stock vLLM, judged by transformers alone.

Every engine here is stock vLLM in processes of its own (``far_engine``, forked: ``forked``), so that its front end runs
ahead of its engine as it does for users: answers are there before requests are aborted, and caches live on while
weights change. Every layer of every row of every answer goes through every trainer's adapter in each of its words. It
is right or it is missing in that trainer's own words; and most of it is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np
import pytest
from engines import prompts
from far_judge import Judge, Tally, of_all, summed, verdict
from far_start import HOST, STOPS, WORDS, Engines, ask, stopped

import kvroute


def test_the_judge_sees_what_is_wrong(judge: Judge) -> None:
    """Goal: the tests of this file can fail. Method: routes that transformers itself has made, right, moved by a token,
    of a prompt that differs at its first token, of the other weights, under a label that is false, without a layer that
    is said to be dense, and with one that is said to be missing."""
    (tokens,) = prompts(99, 60)
    one, other = judge.weights["A"], judge.weights["B"]
    answer = {"prompt": tokens[:40], "completions": [{"tokens": tokens[40:]}]}

    def judged(ids: Any, layers: Sequence[int] = one.layers, label: int | None = None, **more: Any) -> Tally:
        versions = () if label is None else ((0, len(ids), label),)
        fields = tuple(layers), one.experts, one.num_layers, 0, versions
        routes = kvroute.Routes(ids, np.ones(len(ids), np.bool_), *fields, **more)
        return judge.judge(answer, routes=routes, labels={1: "A", 2: "B"})

    ids, _ = one.routed(tokens[:-1])
    found = judged(ids, label=1)
    assert (found.right, found.labelled, +found.wrong) == (found.due, 59, {})
    assert judged(ids, label=2).wrong == {"label": 59}
    for wrong in (np.roll(ids, 1, 0), one.routed([7, *tokens[1:-1]])[0], other.routed(tokens[:-1])[0]):
        assert judged(wrong).wrong["routes"] > 59
        assert judged(wrong).wrong["verl.agent_loop(error)"] > 59
    dense = judged(ids[:, :-1], one.layers[:-1])
    assert (dense.right, dense.missing["layers of rows that are there"]) == (118, 59)
    assert dense.wrong["complete"]
    assert dense.wrong["verl.agent_loop(error)"] == 59
    missing = judged(ids[:, :-1], one.layers[:-1], missing_layers=one.layers[-1:])
    assert (missing.right, missing.missing["layers of rows that are there"], +missing.wrong) == (118, 59, {})
    assert missing.words
    assert missing.refusals


def test_ids_that_come_again_with_stop_strings(start: Engines, judge: Judge, tmp_path: Path) -> None:
    """Goal: rows are of the answer's own tokens, whatever rollout an earlier request of that id has left. Method: two
    epochs of other prompts under the same ids, stop strings, a rollout store that persists; in the third all at once,
    the prompts of the first, sampled otherwise, two completions of each. Then other weights, and the prompts of the
    second epoch: answers of one token, whose rows are the prompt's, so that tokens alone do not tell them from what was
    left."""
    engine = start("KvrouteConnector", {"rollouts": f"file://{tmp_path}/rollouts"})
    first, second = (engine.do(stopped(seed), alone=True) for seed in (1, 2))
    third = [{**each, "sampling": {**each["sampling"], "seed": 7, "n": 2}} for each in stopped(1)]
    answers = [*first, *second, *engine.do(third)]
    ends = [each["ended"] for answer in answers for each in answer["completions"]]
    assert sum(end in STOPS for end in ends) > len(ends) // 2
    with verdict("two epochs, stop strings", of_all(judge, answers)) as found:
        assert found.right == found.due
        assert not found.words
    _, (_, done) = engine.do(
        acts=[["swap", {"home": str(judge.weights["B"].home)}], ["reset", {"reset_connector": True}]]
    )
    assert done is True
    again = [{**each, "sampling": {**each["sampling"], "stop": WORDS}} for each in stopped(2)]
    with verdict("the same prompts, other weights", of_all(judge, engine.do(again, alone=True), "B")) as found:
        assert found.right == found.due
        assert found.due < 6 * 42 * 3, "of one token, or of a special one before it, which has no text"


def test_rollouts_that_a_process_of_its_own_stores(start: Engines, judge: Judge, tmp_path: Path) -> None:
    """Goal: rows are right, and none is missing, whatever becomes of that process. Method: requests of which many are
    aborted at a stop string, so that their routes are found by key alone; then the same, of other prompts, while the
    process is stopped, and killed after a second; and other ones, stored by the next process."""
    engine = start("KvrouteConnector", {"rollouts": f"apart:file://{tmp_path}/rollouts"})
    with verdict("stored apart", of_all(judge, engine.do(stopped(31)))) as found:
        assert found.right == found.due
        assert not found.words
    first = engine.rollouts
    first.suspend()
    killer = Timer(1, first.kill)
    killer.start()
    with verdict("killed", of_all(judge, engine.do(stopped(32)))) as found:
        assert found.right == found.due
    killer.join()
    assert engine.rollouts.pid != first.pid
    with verdict("stored by the next one", of_all(judge, engine.do(stopped(33)))) as found:
        assert found.right == found.due


def test_a_restart_over_what_was_left(start: Engines, judge: Judge, tmp_path: Path) -> None:
    """Goal: an engine that starts again over stores of KV, rows and rollouts hands out no rows of other requests.
    Method: LLM, which counts its requests from 0 again; other prompts with stop strings under the old ids; then the old
    prompts, whose KV comes from outside: with the defaults only the last router is missing, only where it came from
    outside."""
    settings = {"store": f"file://{tmp_path}/rows", "rollouts": f"file://{tmp_path}/rollouts"}
    around: dict[str, Any] = {"front": "LLM", "extra": {"shared_storage_path": str(tmp_path / "kv")}}
    (tmp_path / "kv").mkdir()
    asked = [ask("", prompt) for prompt in prompts(3, 150, 98, 66, 200)]
    before = start("KvrouteExampleConnector", settings, **around)
    answers = [*before.do(stopped(4), alone=True), *before.do(asked)]
    with verdict("before the restart", of_all(judge, answers)) as found:
        assert found.right == found.due
    before.end()
    again = start("KvrouteExampleConnector", settings, **around)
    with verdict("ids from 0 again", of_all(judge, again.do(stopped(5), alone=True))) as found:
        assert found.right == found.due
    answers = again.do(asked)
    outside = [answer["cached"] for answer in answers]
    assert outside == [128, 96, 64, 192]
    with verdict("KV from outside", of_all(judge, answers)) as found:
        assert found.missing == {"layers of rows that are there": sum(outside)}
        assert found.words
        assert found.refusals


TOLD = ["version", {}]


def test_weights_that_change_in_the_midst(start: Engines, judge: Judge) -> None:
    """Goal: no version label is false, and the weights of each row are consistent with its neighbours. Method: weights
    are swapped in place while requests run, in every way that vLLM has: paused and kept with or without its cache,
    running requests begun again with or without the connector, a reset that vLLM refuses. Then the same prompts again,
    and the answers go back as prompts. Version 7 is given of the first weights; later ones have none, but those of the
    last two updates, which vLLM is told."""
    engine, labels = start("KvrouteConnector", {"weights_version": 7}), {7: "A"}
    updates: dict[str, tuple[list[Any], list[Any]]] = {
        "paused, cache kept": ([["pause", {"mode": "keep", "clear_cache": False}]], [["resume", {}]]),
        "paused, cache cleared": ([["pause", {"mode": "keep", "clear_cache": True}]], [["resume", {}]]),
        "reset refused": ([], [["reset", {"reset_running_requests": False, "reset_connector": True}]]),
        "running begin again": ([], [["reset", {"reset_running_requests": True, "reset_connector": True}]]),
        "connector not told": ([], [["reset", {"reset_running_requests": True, "reset_connector": False}]]),
        "version told, cache cleared": ([["pause", {"mode": "keep", "clear_cache": True}]], [TOLD, ["resume", {}]]),
        "version told, cache kept": ([["pause", {"mode": "keep", "clear_cache": False}]], [TOLD, ["resume", {}]]),
    }
    calm = engine.do([ask(f"calm-{i}", prompt) for i, prompt in enumerate(prompts(20, 40, 70, 100))])
    with verdict("before any update", of_all(judge, calm, "A", labels=labels)) as found:
        assert found.right == found.due
        assert found.labelled == found.due // 3
    now, then = "A", "B"
    for number, (what, (first, last)) in enumerate(updates.items()):
        asked = prompts(21 + number, 40, 70, 100, 33)
        asks = [ask(f"{number}-{i}", prompt, max_tokens=60) for i, prompt in enumerate(asked)]
        told = [["version", {"given": str(8 + number)}] if act == TOLD else act for act in last]
        if told != last:
            labels[8 + number] = then
        acts = [*first, ["swap", {"home": str(judge.weights[then].home)}], *told]
        answers, done = engine.do(asks, acts, after=8)
        assert (done[-1] is False) == (what == "reset refused")
        again = engine.do([ask(f"again-{number}-{i}", prompt) for i, prompt in enumerate(asked)])
        turns = [
            ask(f"turn-{number}-{i}", [*each["prompt"], *each["completions"][0]["tokens"], 9])
            for i, each in enumerate(answers)
        ]
        answers += [*again, *engine.do(turns)]
        with verdict(what, of_all(judge, answers, now, then, labels=labels)) as found:
            assert found.right > found.due * 0.6
            assert found.labelled or (number and told == last), "rows of weights that have a version"
            assert told == last or found.labelled > found.due // 3 * 0.25
        _, (done,) = engine.do(acts=[["reset", {"reset_connector": True}]])
        assert done is True
        now, then = then, now
    calm = engine.do([ask(f"calm-{i}", prompt) for i, prompt in enumerate(prompts(20, 40, 70, 100))])
    with verdict("after all updates", of_all(judge, calm, now, labels=labels)) as found:
        assert found.right == found.due


SMALL = {"num_gpu_blocks_override": 16, "max_model_len": 256, "max_num_batched_tokens": 96}


@pytest.mark.parametrize("store", [False, True])
def test_preempted_requests_whose_kv_comes_back(start: Engines, judge: Judge, tmp_path: Path, store: bool) -> None:
    """Goal: offloaded KV brings its rows, or they are marked missing. Method: vLLM's own offloading with the defaults,
    twelve requests that want three times the blocks that there are, twice; then the weights change, the connector is
    told, and they come again: KV that comes back from the host must not be of the old weights."""
    settings = {"store": f"file://{tmp_path}/rows"} if store else {}
    engine = start("KvrouteOffloadingConnector", settings, {**HOST, "offload_prompt_only": False}, **SMALL)
    asked = [ask(f"wave-{i}", prompt, max_tokens=80) for i, prompt in enumerate(prompts(71, *[40] * 12))]
    answers = [*engine.do(asked), *engine.do(asked)]
    assert engine.counter("num_preemptions") > 0
    assert engine.counter("external_prefix_cache_hits") > 0
    with verdict(f"preempted, {'a store' if store else 'no store'}", of_all(judge, answers)) as found:
        assert not found.missing["rows"]
        assert found.right > found.due * 0.6
        assert store or found.right == found.due, "with the defaults rows go by pairs"
    _, (_, done) = engine.do(
        acts=[["swap", {"home": str(judge.weights["B"].home)}], ["reset", {"reset_connector": True}]]
    )
    assert done is True
    tallies = [judge.judge(answer, "A", "B", over=answer["cached"]) for answer in engine.do(asked)]
    with verdict("after an update", summed(tallies)) as found:
        assert found.right > found.due * 0.5
