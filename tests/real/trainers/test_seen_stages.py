"""Where a watch looks in stages of a Megatron model that have no router of the decoder."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from kvroute.replay import ReplayError
from kvroute.replay.seen import watched_routers


class Layer(nn.Module):
    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router = router


def test_a_stage_with_a_router_of_multi_token_prediction_alone_has_none_to_watch(megatron: Any) -> None:
    """Goal: the last stage of a pipeline may have no decoder layer with experts; that is no mistake, and a router that
    is no router of Megatron's is one. Method: a stage without routers, with one of multi-token prediction, and with a
    module that is called as a router is."""
    stage = megatron.Stage((), megatron.config())
    assert watched_routers([stage]) == {}
    stage.mtp = nn.ModuleList([Layer(megatron.Stage((0,), megatron.config()).decoder[0])])
    assert watched_routers([stage]) == {}
    stage.layers = nn.ModuleList([Layer(nn.Linear(2, 2))])
    with pytest.raises(ReplayError, match="model"):
        watched_routers([stage])
