"""Answers that wait for what goes with them leave vLLM's engine core together; a core's calls are heard by its rows."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from inspect import signature
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from cache_manager.keys import Namespace
from kvroute.connector.versions import Versions
from kvroute.integrations.vllm.core import HEARD, answering, heard

Told = Future[dict[str, Any]]


class Output(msgspec.Struct):
    """An answer, under vLLM's names."""

    request_id: str
    kv_transfer_params: dict[str, Any] | None = None


class Outputs(msgspec.Struct):
    outputs: list[Output]
    scheduler_stats: str | None = None
    finished_requests: set[str] | None = None
    weight_version: str | None = None


def test_answers_of_a_step_that_wait_go_out_together() -> None:
    """Goal: hundreds of answers of one step are a message, not hundreds, and others do not wait. Method: three wait, of
    which one is ready before it is asked, and one does not; stats and finished requests go with that one, and once.
    """
    told: list[Told] = [Future() for _ in range(3)]
    told[1].set_result({"kvroute": "rows of 1"})
    outputs = [Output(str(i), {"kvroute": each, "inner": i}) for i, each in enumerate(told)]
    sent = Outputs([*outputs, Output("other")], "stats", {"gone"}, "7")
    made: queue.Queue[tuple[int, Outputs]] = queue.Queue()
    by_client, _ = answering(lambda _: ({3: sent}, True))(SimpleNamespace(output_queue=made))
    assert [each.request_id for each in by_client[3].outputs] == ["other"]
    assert (by_client[3].scheduler_stats, by_client[3].finished_requests) == ("stats", {"gone"})
    for i in (2, 0):
        assert made.empty()
        told[i].set_result({"kvroute": f"rows of {i}"})
    client, late = made.get_nowait()
    assert (client, late.scheduler_stats, late.finished_requests, late.weight_version) == (3, None, None, "7")
    assert [each.kv_transfer_params for each in late.outputs] == [
        {"kvroute": f"rows of {i}", "inner": i} for i in range(3)
    ]
    assert made.empty()


def test_an_engine_without_a_queue_waits_in_its_step() -> None:
    """Goal: an answer in the process of its client is whole when its step is over. Method: another thread brings it."""
    told, sent = Told(), Outputs([])
    sent.outputs.append(Output("a", {"kvroute": told}))
    threading.Timer(0.01, told.set_result, [{"kvroute": "rows"}]).start()
    answering(lambda _: ({0: sent}, True))(SimpleNamespace())
    assert sent.outputs[0].kv_transfer_params == {"kvroute": "rows"}


@pytest.mark.parametrize(
    ("calls", "version"),
    [
        ([("set_weight_version", "7")], 7),
        ([("set_weight_version", "seven")], None),
        ([("collective_rpc", "compute_weight_checksums"), ("add_lora", SimpleNamespace(lora_int_id=1))], 5),
        ([("collective_rpc", "load_weights")], None),
        ([("collective_rpc", print)], None),
        ([("add_lora", SimpleNamespace(lora_int_id=1))] * 2, None),
        ([("pause_scheduler", "keep"), ("resume_scheduler",)], None),
        ([("pause_scheduler", "keep"), ("set_weight_version", "6"), ("resume_scheduler",)], 6),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_what_a_core_is_told_of_weights_is_heard(
    calls: list[tuple[Any, ...]], version: int | None, inside: bool
) -> None:
    """Goal: a version stands as long as nobody may have changed the weights. Method: calls of a core, which go on to
    itself with their signature; the same calls of a core with another connector, and of one without a scheduler yet.
    Ours is the scheduler's connector, or ``inside`` it among others.
    """
    weights, went = Versions(Namespace("m", 5), 5, lambda _: None, named=True), []

    def call(core: Any, told: str = "") -> None:
        went.append((core, told))

    ours = SimpleNamespace(connector=SimpleNamespace(_scheduler_rows=SimpleNamespace(weights=weights)))
    if inside:
        ours.connector = SimpleNamespace(sub_connectors=[SimpleNamespace(), ours.connector])
    for core in (SimpleNamespace(), SimpleNamespace(scheduler=SimpleNamespace(connector=None)), ours):
        for name, *told in calls if core is not ours else ():
            heard(HEARD[name], call)(core, *told)
    assert weights.version == 5
    for name, *told in calls:
        wrapped = heard(HEARD[name], call)
        assert signature(wrapped) == signature(call)
        wrapped(SimpleNamespace(scheduler=ours), *told)
    assert weights.version == version
    assert len(went) == 3 * len(calls)
