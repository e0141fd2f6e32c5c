"""SGLang's scheduler does not wait for answers: their messages go when their rows are there, and others before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from standing_still import until_it_waits
from waiting import GIVE_UP_S, until

from cache_manager.keys import Namespace
from kvroute import Routes, SamplingSupport, routing_spec
from kvroute.connector.answers import routes
from kvroute.connector.fields import FIELD
from kvroute.connector.left import LeftRoutes
from kvroute.connector.settings import Common
from kvroute.integrations.sglang import metrics
from kvroute.integrations.sglang.answers import AnswerCounters, AnswerLimits, Answers
from kvroute.integrations.sglang.capturer import ANSWER, Capturer
from kvroute.integrations.sglang.rows import RoutedRows
from kvroute.rollout import RolloutHandle
from kvroute.rollout.local import LocalRollouts

PAGE = 4
SLOTS = np.arange(PAGE, PAGE + 6)
POOL = SimpleNamespace(req_to_token=torch.from_numpy(SLOTS)[None])
IDS = torch.arange(36, dtype=torch.int32).reshape(6, 3, 2)  # [tokens, layers, top_k]; layer 0 has no router


class GatedRollouts(LocalRollouts):
    """Puts wait until the gate is open; a defect may fail them."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.gate = threading.Event()
        self.has_defect = False

    def put(self, rollout_id: str, routes: Routes, support: SamplingSupport | None = None) -> RolloutHandle:
        assert self.gate.wait(GIVE_UP_S)
        if self.has_defect:
            raise ZeroDivisionError
        return super().put(rollout_id, routes, support)


class Sglang:
    """The parts of a scheduler that the capturer sees: requests, and messages with their new tokens."""

    def __init__(self, home: Path) -> None:
        spec = routing_spec(num_experts=250, top_k=2, layer_ids=[1, 2], num_layers=3, block_tokens=PAGE)
        self.rows = RoutedRows(spec, 4, Namespace("m", 1), Common(strict=True, rollouts=""))
        self.store = GatedRollouts(home)
        self.rows.answers = Answers(spec, LeftRoutes(self.store), self.rows.meter)
        buffer = SimpleNamespace(buffer=torch.zeros(8, 3, 2, dtype=torch.int32))
        theirs = SimpleNamespace(device_cache=buffer, capture=lambda **_: None)
        self.capturer = Capturer(theirs, self.rows)
        self.rows.launch(torch.from_numpy(SLOTS), IDS).finalize()
        self.sent: list[Any] = []
        self.send_output = self.sent.append

    def over(self, rid: str) -> Any:
        """A request that is over, and whose rows SGLang has asked for."""
        req = SimpleNamespace(
            rid=rid,
            output_ids_through_stop=[7, 8],
            origin_input_ids=list(range(5)),
            input_embeds=None,
            positional_embed_overrides=None,
        )
        self.capturer.req = req
        req.routed_experts = self.capturer.get_topk(0, 7, POOL)
        return req

    def stream(self, *reqs: Any) -> None:
        self.capturer.stream(self._streamed, self, reqs)

    def _streamed(self, reqs: list[Any]) -> None:
        fields = [getattr(req, "routed_experts", None) for req in reqs]
        self.send_output(SimpleNamespace(rids=[req.rid for req in reqs], routed_experts=fields, customized_info=None))

    def rids(self) -> list[str]:
        return [rid for message in self.sent for rid in message.rids]

    def answer(self, rid: str) -> dict[str, Any]:
        """A client's answer, from the message that has been sent."""
        (message,) = (message for message in self.sent if rid in message.rids)
        data = message.customized_info[FIELD][message.rids.index(rid)]
        meta = {"id": rid, "routed_experts": message.routed_experts[message.rids.index(rid)], FIELD: data}
        return {"meta_info": meta, "prompt_token_ids": list(range(5)), "output_ids": [7, 8]}


@pytest.fixture
def sglang(tmp_path: Path) -> Iterator[Sglang]:
    made = Sglang(tmp_path)
    yield made
    made.store.gate.set()
    made.rows.close()


def running(rid: str) -> Any:
    return SimpleNamespace(rid=rid)


def test_a_store_that_hangs_holds_no_other_answer(sglang: Sglang) -> None:
    """Goal: the scheduler and requests without rows wait for no store, and an answer's rows are there when it comes.

    Method: one request is over while the store takes nothing; the pages of its rows are given out again meanwhile.
    """
    sglang.stream(running("a"), sglang.over("asked"), running("b"))
    sglang.stream(running("a"))
    assert sglang.rids() == ["a", "b", "a"]
    sglang.rows.launch(torch.from_numpy(SLOTS), IDS + 100).finalize()
    sglang.store.gate.set()
    until(lambda: "asked" in sglang.rids(), what="the answer is not sent")
    answer = sglang.answer("asked")
    assert routes(answer, rollouts=sglang.store).ids.tolist() == IDS[:, 1:].tolist()
    assert answer["meta_info"]["routed_experts"][:, 1:].tolist() == IDS[:, 1:].tolist()
    assert sglang.rows.answers.counters.left == 1
    sglang.stream(running("asked"))  # as with overlap scheduling, which asks once more
    assert sglang.rids()[-1] == "asked"


def test_answers_go_in_the_order_of_their_ends(sglang: Sglang) -> None:
    """Goal: one message for the answers of a pass. Method: two passes, in each of which two requests end."""
    sglang.stream(sglang.over("1"), running("a"), sglang.over("2"))
    sglang.stream(sglang.over("3"))
    assert sglang.rids() == ["a"]
    sglang.store.gate.set()
    until(lambda: len(sglang.rids()) == 4, what="the answers are not sent")
    assert [message.rids for message in sglang.sent] == [["a"], ["1", "2"], ["3"]]
    assert all(routes(sglang.answer(rid), rollouts=sglang.store).complete for rid in "123")


def test_answers_that_are_ready_go_at_once(sglang: Sglang) -> None:
    """Method: the store has taken the routes before SGLang streams the pass; another request's it has not."""
    sglang.store.gate.set()
    first = sglang.over("first")
    until(lambda: getattr(first, ANSWER).ready, what="the answer is not ready")
    sglang.store.gate.clear()
    sglang.stream(first, sglang.over("second"))
    assert sglang.rids() == ["first"]
    assert routes(sglang.answer("first"), rollouts=sglang.store).complete


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (AnswerLimits(answers_max=2), "answers whose routes are not left yet: wanted 2 at most, got more"),
        (AnswerLimits(nbytes_max=50), "rows of answers whose routes are not left yet: wanted 50 bytes, got more"),
    ],
)
def test_where_too_many_answers_wait_a_further_one_says_so(sglang: Sglang, limits: AnswerLimits, why: str) -> None:
    """Goal: memory is bounded; what has no room is counted, named and has its field. Method: three requests end, with
    24 bytes of rows each; later there is room again."""
    sglang.rows.answers = Answers(sglang.rows.spec, LeftRoutes(sglang.store), sglang.rows.meter, limits)
    sglang.stream(*map(sglang.over, ["1", "2", "3"]))
    assert sglang.rids() == ["3"]
    answer = sglang.answer("3")
    assert answer["meta_info"]["routed_experts"][:, 1:].tolist() == IDS[:, 1:].tolist()
    assert answer["meta_info"][FIELD] == [{"error": {"0": why}}]
    assert sglang.rows.answers.counters == AnswerCounters(refused=1)
    sglang.store.gate.set()
    until(lambda: sglang.rids() == ["3", "1", "2"], what="the answers are not sent")
    sglang.stream(sglang.over("4"))
    until(lambda: "4" in sglang.rids(), what="the answer is not sent")
    assert sglang.rows.answers.counters == AnswerCounters(left=3, refused=1)


def test_what_fails_on_the_thread_is_told(sglang: Sglang) -> None:
    """Goal: no client waits for ever. Method: a defect in the store; the next answer is whole."""
    sglang.store.gate.set()
    sglang.store.has_defect = True
    sglang.stream(sglang.over("lost"))
    until(lambda: "lost" in sglang.rids(), what="the answer is not sent")
    sglang.store.has_defect = False
    sglang.stream(sglang.over("whole"))
    until(lambda: "whole" in sglang.rids(), what="the answer is not sent")
    assert "ZeroDivisionError" in sglang.answer("lost")["meta_info"][FIELD][0]["error"]["0"]
    assert sglang.answer("lost")["meta_info"]["routed_experts"][:, 1:].tolist() == IDS[:, 1:].tolist()
    assert routes(sglang.answer("whole"), rollouts=sglang.store).complete
    assert (sglang.rows.answers.counters.failed, sglang.rows.answers.counters.left) == (1, 1)


def test_an_end_of_the_engine_leaves_what_is_under_way(sglang: Sglang) -> None:
    sglang.stream(sglang.over("last"))
    closing = threading.Thread(target=sglang.rows.close)
    closing.start()
    assert until_it_waits(closing)
    sglang.store.gate.set()
    closing.join(GIVE_UP_S)
    assert sglang.rids() == ["last"]
    assert routes(sglang.answer("last"), rollouts=LocalRollouts(sglang.store.directory)).complete


@pytest.mark.parametrize("calls", [[6, 6], [3]])
def test_tokens_without_rows_are_counted_by_cause(sglang: Sglang, calls: list[int]) -> None:
    """Method: a router that is called twice in a pass, or with other tokens; a pass whose end never came; ids that no
    router can choose."""
    for tokens in calls:
        sglang.capturer.capture(1, IDS[:tokens, 1])
    batch = SimpleNamespace(out_cache_loc=torch.from_numpy(SLOTS))
    sglang.capturer.on_forward_end(batch, can_run_graph=False, cuda_graph_batch=None)
    sglang.rows.launch(torch.from_numpy(SLOTS[:2]), IDS[:2])
    sglang.rows.launch(torch.from_numpy(SLOTS[:1]), IDS[:1] - 40).finalize()
    cause = "a router was called twice in a step" if len(calls) > 1 else "a router had other tokens than the step"
    assert sglang.rows.meter.missing == {
        cause: 6,
        "a pass whose end the engine did not report": 2,
        "ids that no router can choose, or KV that could not be loaded": 1,
    }


def test_without_metrics_nothing_is_exported(sglang: Sglang, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: with metrics off nothing is made, in SGLang of any release. See ``tests/real/sglang/test_metrics.py``."""
    monkeypatch.setattr(metrics, "capturer", lambda: sglang.capturer)
    for scheduler in (SimpleNamespace(), SimpleNamespace(metrics_collector=None)):
        metrics.export(scheduler)
        assert sglang.rows.exports is None
