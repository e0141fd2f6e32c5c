"""From the engine to a trainer: what was rolled out, swapped, stored and handed over is what is replayed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from rollouts import FAMILIES, model_of, rollouts, unpaged

from kvroute.capture.capture import RoutingCapture
from kvroute.replay.transformers import packed, replay
from kvroute.routing import routing_spec_from_hf

torch.set_num_threads(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trainer_uses_the_experts_of_the_rollout(family: str, tmp_path: Path) -> None:
    """Goal: the round trip, engine to blocks to swap, store and decode to routes to the routers of a trainer. Method:
    the routes are what transformers routes by itself with the same weights; with *other* weights, which route
    otherwise, every replayed token still goes to the rollout's experts, in all layers."""
    trainer = unpaged(model_of(family, seed=1))
    spec = routing_spec_from_hf(trainer.config, block_tokens=16)
    made = rollouts(family, tmp_path)
    assert {rollout.way for rollout in made} == {"swap", "store", "decode"}
    differing = 0
    for rollout in made:
        rows = len(rollout.tokens) - 1
        assert rollout.routes.complete
        assert len(rollout.routes) == rows
        assert np.array_equal(np.sort(rollout.routes.ids), np.sort(rollout.native[:rows]))
        tokens = torch.tensor([rollout.tokens])
        with RoutingCapture(trainer, spec) as capture, torch.no_grad():
            trainer(tokens, use_cache=False)
            differing += int((capture.rows()[:rows] != rollout.routes.ids).sum())
            capture.clear()
            with replay(trainer, packed([rollout.routes], [len(rollout.tokens)])):
                trainer(tokens, use_cache=False)
            assert np.array_equal(capture.rows()[:rows], rollout.routes.ids)
    assert differing > 0
