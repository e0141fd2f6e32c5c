"""Parts that vLLM's own classes get from the integration, beside calls of vLLM that do nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from toy_engine import Toy

from kvroute.connector.messages import StepMeta
from kvroute.integrations.vllm import versions
from kvroute.integrations.vllm.connector import RowsWithKV

Start = Callable[..., Toy]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts small engines with both ends of a connector, which are closed when the test is over."""
    made: list[Toy] = []
    yield lambda **said: made.append(Toy(**said)) or made[-1]  # type: ignore[func-returns-value]
    for toy in made:
        toy.close()


def test_slots_of_a_pass_in_one_graph_are_not_a_draft_models(start: Start) -> None:
    """Goal: as above, where a pass is one graph. Method: with and without a draft model the engine says the slots
    before the pass and behind it, when the draft may have used their memory; layers of another group, and the draft's,
    have other slots."""

    class Inner:
        bind_connector_metadata = start_load_kv = save_kv_layer = finish_forward = lambda *_, **__: None

    toy, context = start(), SimpleNamespace(slot_mapping={})
    made = type("Made", (RowsWithKV, Inner), {"__init__": lambda _: None})()
    made.worker_rows = made._rank = toy.worker
    made._layers = ("full",)
    layers = {name: SimpleNamespace(slot_mapping=torch.tensor([slot])) for name, slot in (("window", 9), ("full", 3))}
    for drafts in (True, False):
        made._engine = replace(toy.worker.engine, drafts=drafts)
        for late in (True, False):
            made.bind_connector_metadata(StepMeta(None, b""))
            if late:
                made.finish_forward()
            made.start_load_kv(context, attn_metadata=layers)
            made.save_kv_layer("draft", None, SimpleNamespace(slot_mapping=torch.tensor([7])))
            if late and drafts:
                assert toy.worker.slots is None
            else:
                assert toy.worker.slots is not None
                assert toy.worker.slots.tolist() == [3]
            toy.worker.slots = None
            made.save_kv_layer("full", None, layers["full"])
            assert toy.worker.slots is not None


@pytest.mark.parametrize("drafts", [True, False])
def test_slots_are_wanted_before_a_draft_model_runs(start: Start, drafts: bool) -> None:
    """Goal: an engine with a draft model says the slots before the pass. Method: what the scheduler sends, with and
    without one."""

    class Inner:
        build_connector_meta = lambda *_: None  # noqa: E731 - a method

    toy, sent = start(), SimpleNamespace(num_scheduled_tokens={}, has_sync_kv_loads=False)
    made = type("Made", (RowsWithKV, Inner), {"__init__": lambda _: None})()
    made.scheduler_rows, made._engine = toy.scheduler, replace(toy.worker.engine, drafts=drafts)
    toy.scheduler.followed = True
    made.build_connector_meta(sent)
    assert sent.has_sync_kv_loads == drafts


def test_arrived_kv_is_asked_for_by_the_older_name() -> None:
    """Goal: requests wait for their rows up to 0.28, too. Method: the base class of either kind."""

    class Older:
        worker_rows = SimpleNamespace(transfers=True, arrived=lambda received: received - {"waits"})

        def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
            return finished_req_ids, {"comes", "waits"}

    class Newer(Older):
        def get_transfer_results(self, finished_req_ids: set[str]) -> None: ...

    assert versions.older_calls(Newer) == {}
    made = type("Made", (Older,), versions.older_calls(Older))()
    assert made.get_finished({"sent"}) == ({"sent"}, {"comes"})
    made.worker_rows = None
    assert made.get_finished({"sent"}) == ({"sent"}, {"comes", "waits"})
