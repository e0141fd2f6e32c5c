"""Which calls of an MTP layer's router are of tokens that stand: the first one in a proposal, and no other."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cache_manager.errors import ConfigError
from kvroute.connector.mtp import MTP, NEXT_TOKEN, MtpIds, mtp_spec
from kvroute.integrations.vllm.mtp import follow_drafts, mtp_hook, proposing
from kvroute.integrations.vllm.routers import bind_mtp
from kvroute.routing import routing_spec

SPEC = routing_spec(16, 2, (1, 2), num_layers=3, block_tokens=4)


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's forward context."""
    found = SimpleNamespace(slot_mapping={})
    vllm = SimpleNamespace(get_forward_context=lambda: found)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.forward_context", vllm)  # type: ignore[arg-type]
    return found


def test_the_first_pass_of_a_proposal_counts(context: Any) -> None:
    """Goal: a pass over drafts changes nothing, and a warm-up leaves nothing. Method: a call outside a proposal, two
    calls in one, and one in the next proposal of the step."""
    mtp = MtpIds(mtp_spec(SPEC))
    hook, proposer = mtp_hook(mtp), SimpleNamespace(input_ids=torch.tensor([21, 22, 23, 99]))
    slots = np.array([4, 5, 6])
    context.slot_mapping = {"model.layers.3.attn": torch.tensor([4, 5, 6, -1])}
    hook(torch.tensor([[1, 2]] * 3))
    assert not mtp.take(slots)[MTP][1].any()
    with proposing(proposer):
        hook(torch.tensor([[3, 4], [5, 6], [7, 8], [0, 1]]))  # the last one is padding
        proposer.input_ids = torch.tensor([51])
        context.slot_mapping = {"model.layers.3.attn": torch.tensor([5])}
        hook(torch.tensor([[9, 10]]))
    rows = mtp.take(slots)
    assert rows[MTP][0][:, 0].tolist() == [[3, 4], [5, 6], [7, 8]]
    assert rows[NEXT_TOKEN][0].tolist() == [21, 22, 23]
    assert rows[MTP][1].all()
    assert rows[NEXT_TOKEN][1].all()
    context.slot_mapping = {}
    with proposing(proposer):
        hook(torch.tensor([[9, 10]]))
    assert not mtp.take(slots)[MTP][1].any()


class Router:
    """One that takes a hook."""

    def set_capture_fn(self, capture: Any) -> None:
        self.capture = capture


class CPURouter(Router):
    """Under the name of vLLM's class."""


def test_the_drafts_router_is_hooked_and_no_other() -> None:
    """Goal: the model's routers keep their hooks, and a draft with none or with two is refused by name."""
    own, draft = CPURouter(), CPURouter()
    modules = {
        "model.layers.1.mlp.experts": SimpleNamespace(layer_id=1, router=own),
        "model.layers.2.mlp.experts": SimpleNamespace(layer_id=2, router=CPURouter()),
        "model.layers.3.mlp.experts": SimpleNamespace(layer_id=3, router=draft),
        "model.layers.3.self_attn": SimpleNamespace(),
    }
    bind_mtp(modules, SPEC, "model.layers.0.self_attn", lambda: "hook")
    assert draft.capture == "hook"
    assert not hasattr(own, "capture")
    modules["mtp.layers.0.mlp.experts"] = SimpleNamespace(layer_id=0, router=CPURouter())
    with pytest.raises(ConfigError, match=r"settings\.mtp: wanted a draft with one router, got .*mtp\.layers\.0"):
        bind_mtp(modules, SPEC, "model.layers.0.self_attn", lambda: "hook")
    with pytest.raises(ConfigError, match="wanted a draft with one router, got one of dense layers"):
        bind_mtp({}, SPEC, "model.layers.0.self_attn", lambda: "hook")


def test_a_release_without_those_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match=r"settings\.mtp: wanted a release of vLLM whose drafts were judged"):
        follow_drafts()
