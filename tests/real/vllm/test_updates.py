"""Weights that change while an engine runs: every row is of the weights that its version names, or has none."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import updates
from engines import Engine, prompts
from test_server import PAGE, serving
from vllm import SamplingParams

from kvroute.integrations.vllm import routes

Model = Callable[..., Path]
EXTENSION = {"worker_extension_cls": "updates.Embedding"}
ASKED = prompts(90, 40, 70, 100, 33)


@pytest.fixture(scope="module")
def homes(model: Model, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Two checkpoints, by their versions; the second one is the first with another embedding."""
    first = model("qwen3_moe")
    return {0: first, 1: updates.with_embedding_of(first, model("qwen3_moe", 1), tmp_path_factory.mktemp("1") / "b")}


def tokens_of(output: Any) -> list[int]:
    return [*output.prompt_token_ids, *output.outputs[0].token_ids]


class Running:
    """An engine of the first weights, and the requests that run in it."""

    def __init__(self, engine: Engine, homes: dict[int, Path]) -> None:
        self.engine, self.homes = engine, homes
        self.core = engine.llm.llm_engine.engine_core.engine_core

    def put(self, version: int) -> None:
        self.engine.llm.collective_rpc("put", args=(str(self.homes[version]),))

    def begin(self) -> None:
        """As the engine was in the beginning."""
        self.put(0)
        self.engine.llm.update_weight_version("0")
        assert self.engine.llm.reset_prefix_cache(reset_connector=True)

    def interrupted(self, happens: Callable[[], object]) -> list[Any]:
        """The answers to :data:`ASKED`, in the middle of which something happens."""
        llm, sampling = self.engine.llm.llm_engine, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        for i, prompt in enumerate(ASKED):
            llm.add_request(f"r{i}", {"prompt_token_ids": prompt}, sampling)
        done = [output for _ in range(9) for output in llm.step()]
        assert len(done) == 9 * len(ASKED)
        happens()
        while llm.has_unfinished_requests():
            done += llm.step()
        return sorted((output for output in done if output.finished), key=lambda output: int(output.request_id[1]))

    def keeping_kv(self, *told: str) -> None:
        """An update in a pause."""
        self.core.pause_scheduler("keep", clear_cache=False)
        self.put(1)
        for version in told:
            self.engine.llm.update_weight_version(version)
        self.core.resume_scheduler()

    def assert_right(self, outputs: Sequence[Any], cuts: Sequence[int] | None = None, *, again: bool = False) -> None:
        """Every row is there. Without ``cuts`` its version says of which weights; otherwise those before the cut are of
        the first, and others of the second, over the KV of the first or over their own, computed ``again``.
        """
        for i, output in enumerate(outputs):
            tokens, found = tokens_of(output), routes(output)
            if cuts is None:
                assert updates.right(found, tokens, self.homes)
                continue
            parts = [(cuts[i], self.homes[0]), (len(tokens) - 1, self.homes[1])]
            assert found.complete
            expected = (updates.due_again if again else updates.due)([each for each in parts if each[0]], tokens[:-1])
            assert (np.sort(found.ids.astype(np.int64), axis=-1) == expected).all()


CUTS = [len(prompt) + 8 for prompt in ASKED]
"""The first position that is computed by the second weights: nine tokens were answered, the last of them not read."""


@pytest.fixture(scope="module")
def running(homes: dict[int, Path]) -> Iterator[Running]:
    engine = Engine(homes[0], settings={"weights_version": 0}, **EXTENSION)
    yield Running(engine, homes)
    engine.close()


def test_an_update_that_keeps_kv_and_tells_its_version(running: Running) -> None:
    """Goal: rows before and behind an update have their own versions. Method: nine steps, then an update in a pause;
    the same prompts again hit KV of the first weights, whose rows are of the first version still.
    """
    running.begin()
    outputs = running.interrupted(lambda: running.keeping_kv("1"))
    ends = [len(prompt) + 23 for prompt in ASKED]
    spans = [routes(output).weights_versions for output in outputs]
    assert spans == [((0, cut, 0), (cut, end, 1)) for cut, end in zip(CUTS, ends, strict=True)]
    running.assert_right(outputs)
    again = running.engine.ask(ASKED)
    hits = [output.num_cached_tokens for output in again]
    assert hits == [32, 64, 96, 32]
    assert [routes(output).weights_versions[0] for output in again] == [(0, hit, 0) for hit in hits]
    running.assert_right(again)


def test_an_update_without_a_given_version_has_no_version(running: Running) -> None:
    """Goal: no row of other weights has the version of the old ones. Method: as above without a version, in a pause and
    without one; with a name that is none; and a reset that is refused, because requests run.
    """
    llm = running.engine.llm
    events: dict[str, Callable[[], object]] = {
        "in a pause": running.keeping_kv,
        "a name": lambda: running.keeping_kv("step-1"),
        "at once": lambda: running.put(1),
        "refused": lambda: (running.put(1), llm.reset_prefix_cache(reset_connector=True)),
    }
    for happens in events.values():
        running.begin()
        outputs = running.interrupted(happens)
        assert [routes(output).weights_versions for output in outputs] == [((0, cut, 0),) for cut in CUTS]
        running.assert_right(outputs, CUTS)


@pytest.mark.parametrize("connector", [False, True])
def test_a_reset_with_requests_running(running: Running, connector: bool) -> None:
    """Goal: all is computed again, by the new weights, and each token keeps the row that it was sampled with. Method:
    vLLM preempts what runs; with a version that was told before the reset, and without one; the connector is told of
    the reset, or not. The same prompts again are of the new weights alone.
    """
    core, nobody = running.engine.llm.llm_engine.engine_core, list[str]()
    for told in (["1"], nobody):

        def happens(told: list[str] = told) -> None:
            running.put(1)
            for version in told:
                running.engine.llm.update_weight_version(version)
            assert core.reset_prefix_cache(True, connector)

        running.begin()
        outputs = running.interrupted(happens)
        ends = [len(tokens_of(output)) - 1 for output in outputs]
        spans = [((0, cut, 0), (cut, end, 1)) if told else ((0, cut, 0),) for cut, end in zip(CUTS, ends, strict=True)]
        assert [routes(output).weights_versions for output in outputs] == spans
        running.assert_right(outputs, CUTS, again=True)
        running.assert_right(running.engine.ask(ASKED), [0] * len(ASKED))


def test_a_reset_that_is_refused_changes_nothing(running: Running) -> None:
    """Goal: rows and version of KV that stays are there. Method: a reset while requests run, which vLLM refuses; and
    the same prompts again, which hit that KV.
    """
    running.begin()
    scope = running.engine.sent.keys.scope
    outputs = running.interrupted(lambda: running.engine.llm.reset_prefix_cache(reset_connector=True))
    outputs += running.engine.ask(ASKED)
    assert all(output.num_cached_tokens for output in outputs[len(ASKED) :])
    assert running.engine.sent.keys.scope == scope
    assert [len(routes(output).weights_versions) for output in outputs] == [1] * len(outputs)
    running.assert_right(outputs)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_sleep_at_each_level(running: Running, monkeypatch: pytest.MonkeyPatch, level: int) -> None:
    """Goal: an engine that wakes up has all rows of what it computes; they have a version if one was told since; KV
    that was kept keeps its rows and their version, and of KV that was given up nothing is read. Method: each level,
    with and without a version; the executor's part, which a CPU lacks, does nothing, and the weights of level 2 are put
    in place again."""
    core, llm = running.core, running.engine.llm
    for call in ("sleep", "wake_up"):
        monkeypatch.setattr(core.model_executor, call, lambda *_, **__: None)
    running.begin()
    running.assert_right(running.engine.ask(ASKED))
    core.sleep(level)
    assert core.is_scheduler_paused()
    if level == 2:
        running.put(0)
    core.wake_up(None if level else ["scheduling"])
    untold = running.engine.ask(ASKED)
    hits = [output.num_cached_tokens for output in untold]
    assert hits == ([0, 0, 0, 0] if level else [32, 64, 96, 32])
    spans = [routes(output).weights_versions for output in untold]
    assert spans == [((0, hit, 0),) if hit else () for hit in hits]
    running.engine.assert_right(untold)
    core.sleep(level)
    core.wake_up(None if level else ["scheduling"])
    llm.update_weight_version("0")
    running.assert_right(running.engine.ask(prompts(93, 40, 70)))


def recipes() -> list[list[tuple[str, dict[str, Any]]]]:
    """The calls of the page's recipes, each a list of paths and bodies; no path stands for the update itself."""
    section = PAGE.read_text().partition("\n## Weight updates\n")[2].partition("\n## ")[0]
    found = []
    for code in re.findall(r"^```bash\n(.*?)^```", section, flags=re.DOTALL | re.MULTILINE):
        calls = []
        for line in re.sub(r" *\\\n *", " ", code).splitlines():
            call = re.fullmatch(r"curl -X POST '?localhost:8000(\S+?)'?(?: -H \S+ \S+ -d '(.*)')?", line)
            if call is not None:
                calls.append((call[1], eval(call[2] or "{}")))  # noqa: S307 (the page's own lines)
            elif line.startswith("# "):
                calls.append(("", {}))
        found.append(calls)
    return found


@pytest.mark.timeout(900)
def test_the_recipes_work_with_requests_running(
    homes: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: the page's recipes work, in vLLM's own processes. Method: its own lines, with other weights in the place of
    the update, while requests run; each row against transformers of the weights that its version names."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    asked, now, spans = iter(prompts(92, *[60] * 1000)), 0, list[list[list[int]]]()
    # one after the other: then some are waiting when the update comes
    more = ["--worker-extension-cls", EXTENSION["worker_extension_cls"], "--max-num-seqs", "1"]
    with (
        serving(homes[0], tmp_path, tmp_path / "log", "response:", *more, connector="KvrouteConnector") as server,
        ThreadPoolExecutor(3) as threads,
    ):
        server.post("/update_weight_version", new_version="0")
        for number, calls in enumerate(recipes()):
            before, after = threading.Event(), threading.Event()

            def client(before: threading.Event = before, after: threading.Event = after) -> list[Any]:
                """Sends requests until the update is over, however late that is."""
                answers = []
                while not after.is_set():
                    answers.append(server.post("/v1/completions", prompt=next(asked), max_tokens=400))
                    before.set()
                return answers

            clients = [threads.submit(client) for _ in range(3)]
            assert before.wait(300)
            now = 1 - now
            for path, body in calls:
                if path:
                    server.post(path, **{key: str(now) for key in body})
                else:
                    server.post("/collective_rpc", method="put", args=[str(homes[now])])
            after.set()
            spans.append([])
            for answer in chain.from_iterable(each.result(300) for each in clients):
                choice, found = answer["choices"][0], routes(answer)
                tokens = [*choice["prompt_token_ids"], *choice["token_ids"]]
                assert updates.right(found, tokens, homes, again=number == 1)
                spans[-1].append([version for _, _, version in found.weights_versions])
    changes = list(zip(spans, ((0, 1), (1, 0)), strict=True))
    for each, (old, new) in changes:
        assert all(versions in ([old], [old, new], [new]) for versions in each)
        assert [old] in each
        assert [new] in each
    crossed = [each.count([old, new]) for each, (old, new) in changes]
    assert max(crossed) == 1, "one was running, unless an update came between two; no other saw both weights"
