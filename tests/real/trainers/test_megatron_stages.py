"""Stages of a pipeline of Megatron-core that have no router."""

from __future__ import annotations

import mcore
import pytest
import torch
from routes_of import made_routes

from kvroute.replay import megatron as replay
from kvroute.replay.rows import ReplayError
from kvroute.routes import Split

ALONE = Split()


@pytest.mark.parametrize(
    ("layout", "pp", "rank"), [(None, 3, 0), ("Ettt|ttt|ttt|L", 4, 3)], ids=["dense layers", "the loss alone"]
)
def test_a_stage_without_routers_has_nothing_to_replay(layout: str | None, pp: int, rank: int) -> None:
    """Goal: the same calls on every stage. Method: real stages of a pipeline, without a router: rows of no layer, a
    whole schedule; without the flag, or with a router that does not replay, the stage is refused as before."""
    how = {} if layout is None else {"pipeline_model_parallel_layout": layout}
    with mcore.rank_of(rank, pp, pp=pp):
        made = mcore.config(num_layers=9, moe_layer_freq=[0] * 3 + [1] * 6, pipeline_model_parallel_size=pp, **how)
        stage = mcore.stage_of(made, first=rank == 0, last=rank == pp - 1)
        assert replay.layer_ids(stage) == ()
        with replay.schedule(stage):
            rows = replay.packed(stage, [made_routes(1, 5)], [6], ALONE)
            assert rows.shape == (6, 0, 4)
            replay.install(stage, rows)
            replay.backward(stage)
            with pytest.raises(ReplayError, match=r"rows: wanted integers \[tokens, 0 layers, top_k\]"):
                replay.install(stage, rows.new_zeros(6, 1, 4))
        stage.router = torch.nn.Linear(1, 1)
        with pytest.raises(ReplayError, match="moe_enable_routing_replay, got none"):
            replay.layer_ids(stage)
        del stage.router
        made.moe_enable_routing_replay = False
        with pytest.raises(ReplayError, match="moe_enable_routing_replay, got none"):
            replay.layer_ids(stage)
