"""Rows and routers of Megatron-core that do not belong together: counted, named, and refused before any routing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from routes_of import made_routes

from cache_manager.errors import RowError
from kvroute.replay import megatron as replay
from kvroute.replay.rows import ReplayError
from kvroute.routes import Routes, Split

LAYERS = (1, 2, 3)
ALONE = Split()


def nothing_is_left(stage: Any) -> bool:
    return all(
        router.router_replay.target_topk_idx is None
        and router.router_replay.router_replay_action is None
        and not router.router_replay.replay_backward_list
        for router in stage.decoder
    )


@pytest.mark.parametrize(("said", "real"), [([5], [6]), ([5, 5], [6, 6]), ([6, 6], [6, 5])])
def test_rows_are_counted_before_an_expert_is_chosen(megatron: Any, said: list[int], real: list[int]) -> None:
    """Goal: no token gets its neighbour's experts. Method: lengths that are one token off, as `len(rows)` for
    `len(rows) + 1` is: the first router refuses, and none chooses anything; cleared, they choose for themselves."""
    stage = megatron.Stage(LAYERS, megatron.config())
    used, hidden = megatron.Used(stage), torch.randn(sum(real), 1, megatron.HIDDEN)
    parts = [made_routes(i, count) for i, count in enumerate(real)]
    with replay.schedule(stage):
        replay.install(stage, replay.packed(stage, parts, said, ALONE, missing="spread"))
        wanted = f"router of layer 1: wanted {sum(said)} local tokens, as rows were installed, got {sum(real)}"
        with pytest.raises(ReplayError, match=wanted):
            stage(hidden)
        assert not used.experts
    assert nothing_is_left(stage)
    stage(hidden)
    assert len(used.experts[1]) == 1


@pytest.mark.parametrize("form", ["packed", "padded"])
def test_a_router_that_the_routes_lack_is_refused(megatron: Any, form: str) -> None:
    """Goal: no zeros for a router. Method: a model with a router on a layer that is dense to the routes, and routes
    that lack a layer or a cell of it, with top-1, where zeros would pass for distinct ids."""

    def rows(routes: Routes, **how: Any) -> torch.Tensor:
        if form == "packed":
            return replay.packed(stage, [full, routes], [6, 6], ALONE, **how)
        return replay.padded(stage, [full, routes], [6, 6], 6, ALONE, side="right", **how)

    stage = megatron.Stage((1, 2, 3), megatron.config(moe_router_topk=1, moe_router_pre_softmax=True))
    full = made_routes(1, 5, top_k=1)
    fields = full.num_experts, full.num_layers
    dense = Routes(full.ids[:, 1:], full.valid, (2, 3), *fields)
    with pytest.raises(
        ReplayError, match=r"layer 1: wanted a router in the routes of sample 1, .* on \(2, 3\), got one"
    ):
        rows(dense)
    for lacks, where in (
        (Routes(full.ids[:, 1:], full.valid, (2, 3), *fields, missing_layers=(1,)), "row 0 layer 1"),
        (full.without([3], np.arange(5) == 4), "row 4 layer 3"),
    ):
        with pytest.raises(RowError, match=f"sequence 1 {where}: wanted a row"):
            rows(lacks)
        spelled = rows(lacks, missing="spread")
        unlike = (spelled != rows(full)).any(dim=2).nonzero().tolist()
        at = [6 + p if form == "packed" else 2 * p + 1 for p in range(5)]
        assert all((i in at and j == 0) if "layer 1" in where else (i, j) == (at[4], 2) for i, j in unlike)
        replay.install(stage, spelled)
        replay.clear(stage)


def test_a_split_of_layers_is_the_models_own(megatron: Any) -> None:
    stage = megatron.Stage(LAYERS, megatron.config())
    with pytest.raises(ReplayError, match="split: wanted pp=1: the model has the layers of its stage"):
        replay.packed(stage, [made_routes(1, 5)], [6], Split(pp=2, pp_rank=1))


def test_a_schedule_ends_whatever_happens_in_it(megatron: Any) -> None:
    """Goal: a failed pass leaves nothing for the next. Method: an error inside, and a schedule inside a schedule, which
    would forget the outer one's rows."""
    stage = megatron.Stage(LAYERS, megatron.config())
    rows = replay.packed(stage, [made_routes(1, 5)], [6], ALONE)

    def fails() -> None:
        with replay.schedule(stage):
            replay.install(stage, rows)
            stage(torch.randn(6, 1, megatron.HIDDEN))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert nothing_is_left(stage)
    with replay.schedule(stage):
        replay.install(stage, rows)
        with (
            pytest.raises(ReplayError, match="schedule: wanted one schedule of a model at a time"),
            replay.schedule(stage),
        ):
            pass
        assert not nothing_is_left(stage)
    with replay.schedule(stage):
        assert nothing_is_left(stage)
