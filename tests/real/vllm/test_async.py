"""Asynchronous scheduling: a step is scheduled before the one before it has answered, so the scheduler runs ahead.

How it is turned on where the device is a CPU: :mod:`ahead`. What is left is the order that matters to rows: two batches
in the queue, tokens that the scheduler does not know yet, requests that are finished or taken out when their next step
has been sent.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from ahead import schedule
from engines import BLOCK, Engine, prompts
from vllm import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from kvroute.integrations.vllm import routes, unseen
from kvroute.rollout import open_rollouts

Start = Any  # conftest's Engines
Model = Callable[..., Path]
ASKED = prompts(60, 150, 98, 66)
FULL = [128, 96, 64]
SHORT = prompts(62, *[35] * 8)


@pytest.fixture(scope="module", autouse=True)
def ahead() -> Iterator[None]:
    """Every engine here schedules ahead, and writes rows behind its steps, as beside a device."""
    with pytest.MonkeyPatch.context() as patch:
        schedule(patch)
        yield


class Ahead:
    """How many batches were under way, at most, when a step was sent."""

    def __init__(self, engine: Engine) -> None:
        core = engine.llm.llm_engine.engine_core.engine_core
        assert isinstance(core.scheduler, AsyncScheduler)
        assert core.batch_queue_size == 2
        self.most, build = 0, core.scheduler.connector.build_connector_meta

        def counted(output: Any) -> Any:
            self.most = max(self.most, 1 + len(core.batch_queue))
            return build(output)

        core.scheduler.connector.build_connector_meta = counted


def settings(home: Path) -> dict[str, Any]:
    """Of an engine over the directories of KV, rows and rollouts in ``home``."""
    urls = {"store": f"file://{home / 'rows'}", "rollouts": f"file://{home / 'rollouts'}"}
    return {"settings": {**urls, "witness": "flagged"}, "extra": {"shared_storage_path": str(home / "kv")}}


def assert_right(engine: Engine, outputs: Sequence[Any], home: Path) -> None:
    with closing(open_rollouts(f"file://{home / 'rollouts'}")) as left:
        engine.assert_right(outputs, rollouts=left)


@pytest.fixture(scope="module")
def stored(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """KV and rows of the prompts, left by an engine that has ended."""
    home = tmp_path_factory.mktemp("stored")
    engine = Engine(model("qwen3_moe"), "KvrouteExampleConnector", **settings(home))
    try:
        queue = Ahead(engine)
        assert_right(engine, engine.ask(ASKED), home)
        assert_right(engine, engine.ask(SHORT, max_tokens=1), home)
        assert queue.most == 2
    finally:
        engine.close()
    return home


@pytest.fixture
def start(engine: Start, model: Model, stored: Path, tmp_path: Path) -> Callable[..., tuple[Engine, Ahead, Path]]:
    """An engine over a copy of these files, as after a restart, and the path of the copy."""

    def made(connector: str, **arguments: Any) -> tuple[Engine, Ahead, Path]:
        home = shutil.copytree(stored, tmp_path / "home")
        found = engine(model("qwen3_moe"), f"Kvroute{connector}", **settings(home), **arguments)
        return found, Ahead(found), home

    return made


@pytest.mark.parametrize("connector", ["ExampleConnector", "connectors:LateConnector"])
def test_a_prefix_of_a_store_after_a_restart(start: Any, connector: str) -> None:
    """Goal: rows of KV that was loaded, while the scheduler runs ahead. Method: three requests hit what another engine
    left while two others are computed, at once or two steps later; a second turn hits blocks that were loaded and
    blocks that were decoded.
    """
    made, queue, home = start(connector)
    outputs = made.ask([*ASKED, *prompts(61, 40, 150)])
    assert [output.num_cached_tokens for output in outputs] == [*FULL, 0, 0]
    assert [unseen(output) for output in outputs] == [*(((0, full),) for full in FULL), (), ()]
    assert_right(made, outputs, home)
    assert made.kept.blocks.counters.restored_blocks == sum(FULL) // BLOCK
    assert queue.most == 2
    turns = made.ask([[*p, *o.outputs[0].token_ids, 7] for p, o in zip(ASKED, outputs, strict=False)])
    assert min(output.num_cached_tokens for output in turns) >= FULL[-1]
    assert_right(made, turns, home)
    assert made.kept.missing.total() == 0
    made.kept.blocks.assert_consistent()


def test_preemption_of_requests_whose_prefix_was_loaded(start: Any) -> None:
    """Goal: blocks are taken from requests whose next step has been sent. Method: 15 blocks for eight requests that hit
    a stored prefix and decode until they want twice as many; they are preempted, come back, and hit again.
    """
    made, queue, home = start(
        "connectors:ResumingConnector", num_gpu_blocks_override=16, max_model_len=256, max_num_batched_tokens=96
    )
    for _ in range(2):
        assert_right(made, made.ask(SHORT, max_tokens=70), home)
    assert made.metric("num_preemptions") > 0
    assert made.kept.blocks.counters.restored_blocks > len(SHORT)
    assert queue.most == 2
    assert_right(made, made.ask(prompts(63, 5, 40, 9, shared=100), max_tokens=30), home)
    made.kept.blocks.assert_consistent()


def test_abort_while_the_next_step_is_under_way_and_a_weight_update(start: Any) -> None:
    """Goal: an aborted request leaves no wrong row, nor does a weight update. Method: abort after each number of steps,
    of a request that hits a stored prefix and of one that does not, with another one beside them; ask all again; after
    a reset nothing from before is found, in no tier.
    """
    made, queue, home = start("ExampleConnector", num_gpu_blocks_override=32)
    core, sampling = made.llm.llm_engine, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    beside, fresh = prompts(64, 50, 90)
    for steps in range(1, 5):
        asked = {f"beside-{steps}": beside, f"hit-{steps}": ASKED[steps % 3], f"fresh-{steps}": fresh}
        for name, prompt in asked.items():
            core.add_request(name, {"prompt_token_ids": prompt}, sampling)
        done = [output for _ in range(steps) for output in core.step()]
        assert not any(output.finished for output in done)
        core.abort_request([f"hit-{steps}", f"fresh-{steps}"])
        while core.has_unfinished_requests():
            done += core.step()
        assert_right(made, [output for output in done if output.finished], home)
        assert sum(output.finished for output in done) == 1
    assert queue.most == 2
    assert_right(made, made.ask([*ASKED, beside, fresh]), home)
    assert made.llm.llm_engine.engine_core.reset_prefix_cache(False, True)
    again = made.ask(ASKED)
    assert [output.num_cached_tokens for output in again] == [0, 0, 0]
    assert_right(made, again, home)
    with closing(open_rollouts(f"file://{home / 'rollouts'}")) as left:
        found = [routes(output, rollouts=left) for output in again]
    assert {span[2] for each in found for span in each.weights_versions} == set(), "nobody gave a version"
    made.kept.blocks.assert_consistent()
