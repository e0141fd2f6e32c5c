"""Answers that wait for what goes with them leave vLLM's engine core together, each whole and none lost."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest

from kvroute.integrations.vllm import core


class Output(msgspec.Struct):
    """An answer, under vLLM's names."""

    request_id: str
    kv_transfer_params: dict[str, Any] | None = None


class Outputs(msgspec.Struct):
    outputs: list[Output]
    scheduler_stats: str | None = None
    finished_requests: set[str] | None = None
    weight_version: str | None = None


class Core:
    """An engine core of which each step answers what it is told to."""

    def __init__(self, answers: dict[int, Outputs], **said: Any) -> None:
        self.answers = answers
        self.__dict__.update(said)

    def step(self) -> tuple[dict[int, Outputs], bool]:
        return self.answers, True


Told = Future[dict[str, Any]]


def of_one_step(waiting: int, *ready: str) -> tuple[list[Told], Outputs, queue.Queue[tuple[int, Outputs]]]:
    """What a step of a core with a queue has answered: some that wait, some that are ``ready``; and its queue."""
    told: list[Told] = [Future() for _ in range(waiting)]
    outputs = [Output(str(i), {"kvroute": each, "inner": i}) for i, each in enumerate(told)]
    sent = Outputs(outputs + [Output(name) for name in ready], "stats", {"gone"}, "7")
    made: queue.Queue[tuple[int, Outputs]] = queue.Queue()
    by_client, _ = core._answering(engine := Core({3: sent}, output_queue=made), engine.step)()
    return told, by_client[3], made


def bring(told: list[Told], *numbers: int) -> None:
    for i in numbers:
        told[i].set_result({"kvroute": f"rows of {i}"})


def names(sent: Outputs) -> list[str]:
    return [each.request_id for each in sent.outputs]


def test_answers_that_are_ready_together_go_out_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: hundreds of answers of one step are a message, not hundreds, and others do not wait. Method: three wait and
    one does not; the stats and the finished requests go with that one, and once. The last one sends them.
    """
    monkeypatch.setattr(core, "TOGETHER_S", 600)
    told, at_once, made = of_one_step(3, "other")
    assert names(at_once) == ["other"]
    assert (at_once.scheduler_stats, at_once.finished_requests) == ("stats", {"gone"})
    bring(told, 2, 0, 1)
    client, sent = made.get(timeout=20)
    assert client == 3
    assert names(sent) == ["2", "0", "1"]
    assert [each.kv_transfer_params for each in sent.outputs] == [
        {"kvroute": f"rows of {i}", "inner": i} for i in (2, 0, 1)
    ]
    assert (sent.scheduler_stats, sent.finished_requests, sent.weight_version) == (None, None, "7")
    assert made.empty()


def test_an_answer_that_waits_long_holds_up_no_other() -> None:
    """Goal: what is ready goes out, whatever becomes of the rest. Method: one of three answers comes after the others
    have arrived.
    """
    told, _, made = of_one_step(3)
    bring(told, 0, 1)
    came = names(made.get(timeout=20)[1])
    while len(came) < 2:
        came += names(made.get(timeout=20)[1])
    assert came == ["0", "1"]
    bring(told, 2)
    assert names(made.get(timeout=20)[1]) == ["2"]


def test_a_process_without_room_for_a_thread_sends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: an answer that nobody would send later is sent now. Method: no thread can be started."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    told, _, made = of_one_step(2)
    bring(told, 1)
    assert names(made.get_nowait()[1]) == ["1"]


def test_an_engine_without_a_queue_waits_in_its_step() -> None:
    """Goal: an answer in the process of its client is whole when its step is over. Method: another thread brings it."""
    told = Told()
    engine = Core({0: (sent := Outputs([Output("a", {"kvroute": told})]))})
    threading.Timer(0.01, told.set_result, [{"kvroute": "rows"}]).start()
    core._answering(engine, engine.step)()
    assert sent.outputs[0].kv_transfer_params == {"kvroute": "rows"}
