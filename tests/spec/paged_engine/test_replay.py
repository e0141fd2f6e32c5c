"""From the engine to a trainer: what was rolled out, swapped, stored and handed over is what is replayed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from adapters import WHOLE
from experts_seen import experts_of
from rollouts import FAMILIES, REFUSED, model_of, rollouts, unpaged

from kvroute.replay.transformers import packed, replay

torch.set_num_threads(1)


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {*REFUSED}))
def test_a_trainer_uses_the_experts_of_the_rollout(family: str, tmp_path: Path) -> None:
    """Goal: the round trip, engine to blocks to swap, store and decode to routes to the routers of a trainer. Method:
    the experts that a plain pass of the same weights calls are in the routes, and every adapter hands on these very
    ids; with *other* weights, which route otherwise, every replayed token still comes to the rollout's experts, in all
    layers. The routers of other trainers: tests/real/trainers."""
    trainer = unpaged(model_of(family, seed=1))
    made = rollouts(family, tmp_path)
    assert {rollout.way for rollout in made} == {"swap", "store", "decode"}
    differing = 0
    for rollout in made:
        rows = len(rollout.tokens) - 1
        assert rollout.routes.complete
        assert len(rollout.routes) == rows
        assert np.array_equal(np.sort(rollout.routes.ids), np.sort(rollout.native[:rows]))
        for adapter, make in WHOLE.items():
            handed = np.asarray(make(rollout.routes, len(rollout.tokens) - 5, 5))[:rows, list(rollout.routes.layer_ids)]
            assert np.array_equal(handed, rollout.routes.ids), adapter
        tokens = torch.tensor([rollout.tokens])
        differing += int((experts_of(trainer, tokens)[:rows] != rollout.routes.ids).sum())
        with replay(trainer, packed([rollout.routes], [len(rollout.tokens)])):
            used = experts_of(trainer, tokens)[:rows]
        assert np.array_equal(used, rollout.routes.ids)
    assert differing > 0
