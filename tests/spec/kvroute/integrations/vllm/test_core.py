"""Answers that wait for their routes leave vLLM's engine core; the rows are notified of a core's calls."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from copy import copy, deepcopy
from inspect import signature
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from cache_manager.errors import ConfigError
from cache_manager.keys import Namespace
from kvroute.connector.end import PendingAnswer
from kvroute.connector.versions import Versions
from kvroute.integrations.vllm.core import (
    HEARD,
    Sending,
    answering,
    check_alone,
    check_followed,
    heard,
    hears,
    hears_no_more,
)


class Rows:
    """The part of a scheduler's rows that a core sees."""

    followed = False
    blocks_followed = True
    field = None

    def __init__(self, weights: Versions) -> None:
        self.weights = weights


class Output(msgspec.Struct):
    """An answer, under vLLM's names."""

    request_id: str
    kv_transfer_params: dict[str, Any] | None = None


class Outputs(msgspec.Struct):
    outputs: list[Output]
    scheduler_stats: str | None = None
    finished_requests: set[str] | None = None
    weight_version: str | None = None


def test_answers_of_a_step_go_out_as_the_core_says() -> None:
    """Goal: hundreds of answers of one step are a few messages, and none waits for another that is not ready. Method:
    four wait, of which one is ready before the core checks it, two become ready together, and one comes last; a fifth
    waits for nothing; stats and finished requests go with that one, and once."""
    told = [PendingAnswer() for _ in range(4)]

    def tell(*which: int) -> None:
        for i in which:
            told[i].value = {"kvroute": f"rows of {i}"}
        for i in which:
            told[i].tell()

    tell(1)
    outputs = [Output(str(i), {"kvroute": each, "inner": i}) for i, each in enumerate(told)]
    sent = Outputs([*outputs, Output("other")], "stats", {"gone"}, "7")
    made: queue.Queue[tuple[int, Outputs]] = queue.Queue()
    by_client, _ = answering(lambda _: ({3: sent}, True))(SimpleNamespace(output_queue=made))
    assert [each.request_id for each in by_client[3].outputs] == ["other"]
    assert (by_client[3].scheduler_stats, by_client[3].finished_requests) == ("stats", {"gone"})
    for which in ([1], [0, 2], [3]):
        tell(*(i for i in which if not told[i].done()))
        client, late = made.get_nowait()
        assert (client, late.scheduler_stats, late.finished_requests, late.weight_version) == (3, None, None, "7")
        assert [each.kv_transfer_params for each in late.outputs] == [
            {"kvroute": f"rows of {i}", "inner": i} for i in which
        ]
        assert made.empty()


def test_an_engine_without_a_queue_waits_in_its_step() -> None:
    """Goal: an answer in the process of its client is whole when its step is over. Method: another thread brings it."""
    told, sent = PendingAnswer(), Outputs([])
    sent.outputs.append(Output("a", {"kvroute": told}))
    threading.Timer(0.01, told.set_result, [{"kvroute": "rows"}]).start()
    answering(lambda _: ({0: sent}, True))(SimpleNamespace())
    assert sent.outputs[0].kv_transfer_params == {"kvroute": "rows"}


def test_the_rows_of_a_step_that_was_not_sent_go_with_the_next() -> None:
    """Goal: no step's rows are left behind, with their spare blocks. Method: two updates of a scheduler before the core
    comes to its sending."""
    filled: list[str] = []
    field = SimpleNamespace(
        update=lambda _, update, step, __: (update(step), f"rows of {step}"),
        fill=lambda _, rows, **__: filled.append(rows),
        failed=[],
        stream=SimpleNamespace(late=False),
    )
    core = SimpleNamespace(scheduler=SimpleNamespace(update_from_output=lambda _: {}))
    sending = Sending(core, field)
    core.scheduler.update_from_output("1", None)
    core.scheduler.update_from_output("2", None)
    sending.send()
    sending.send()
    assert filled == ["rows of 1", "rows of 2"]


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
@pytest.mark.parametrize(
    "copied", [copy, deepcopy, lambda of: SimpleNamespace(instance_id="", model_config=of.model_config)]
)
def test_calls_of_the_core_about_weights_are_seen(
    calls: list[tuple[Any, ...]], version: int | None, copied: Callable[[Any], Any]
) -> None:
    """Goal: a version is valid as long as no call may have changed the weights. Method: calls of a core, which go on to
    itself with their signature; the same calls of another core, and of one without a configuration yet. The connector
    of ours has a copy of its configuration, from whatever connector is around it."""
    weights, went = Versions(Namespace("m", 5), 5, lambda _: None, named=True), []

    def call(core: Any, told: str = "") -> None:
        went.append((core, told))

    ours, other = (SimpleNamespace(vllm_config=SimpleNamespace(instance_id=i, model_config=object())) for i in "ab")
    hears(copied(ours.vllm_config), rows := Rows(weights))
    for core in (SimpleNamespace(), other):
        for name, *told in calls:
            heard(HEARD[name], call)(core, *told)
    assert weights.version == 5
    for name, *told in calls:
        wrapped = heard(HEARD[name], call)
        assert signature(wrapped) == signature(call)
        wrapped(ours, *told)
    assert weights.version == version
    assert len(went) == 3 * len(calls)
    answering(lambda _: (None, True))(other)
    with pytest.raises(ConfigError, match="kv_connector"):
        check_followed(rows)
    answering(lambda _: (None, True))(ours)
    check_followed(rows)


def test_two_cores_of_one_configuration_are_refused() -> None:
    """Goal: rows never hear what was said to another core. Method: a second connector whose core has the configuration
    of the first one's, a copy of it, or one made anew from it; then without the first one."""
    config = SimpleNamespace(instance_id="c", model_config=object())
    again = copy(config), SimpleNamespace(instance_id="d", model_config=config.model_config)
    check_alone(config)
    hears(config, first := Rows(Versions(Namespace("m", 5), 5, lambda _: None, named=True)))
    for other in (config, *again):
        with pytest.raises(ConfigError, match="one connector of kvroute in an engine, inside a MultiConnector too"):
            check_alone(other)
    check_alone(SimpleNamespace(instance_id="e", model_config=object()))
    hears_no_more(first)
    check_alone(config)
    hears(config, second := Rows(first.weights))
    heard(HEARD["set_weight_version"], lambda *_: None)(SimpleNamespace(vllm_config=config), "7")
    assert (first.weights.version, second.followed) == (7, False)
    del second  # a core that was dropped without its shutdown
    check_alone(config)
