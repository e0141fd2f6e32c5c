"""Replay in NeMo-Automodel's own gates, in every way they score."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from nemo_automodel.components.moe.config import MoEConfig
from nemo_automodel.components.moe.layers import Gate
from nemo_automodel.components.moe.router_replay import RouterReplay
from routes_of import made_routes
from torch import nn

from kvroute.replay import nemo_rl, watch
from kvroute.replay.rows import ReplayError

EXPERTS, TOP_K, HIDDEN = 16, 4, 8


def gates(**changes: Any) -> MoEConfig:
    """The arguments from which Automodel's gates are made."""
    made = MoEConfig(
        n_routed_experts=EXPERTS, n_shared_experts=0, n_activated_experts=TOP_K, n_expert_groups=1, n_limited_groups=1,
        train_gate=True, gate_bias_update_factor=0.0, aux_loss_coeff=0.0, score_func="softmax", route_scale=1.0,
        dim=HIDDEN, inter_dim=8, moe_inter_dim=8, norm_topk_prob=False, dtype=torch.float32, enable_routing_replay=True,
    )  # fmt: skip
    return replace(made, **changes)


class Layer(nn.Module):
    def __init__(self, gate: Gate | None) -> None:
        super().__init__()
        self.gate = gate


class Model(nn.Module):
    """The gates of layers 1, 2 and 3, under the names they have in a model; layer 0 is dense."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        made = gates(**changes)
        self.layers = nn.ModuleList([Layer(None), *(Layer(Gate(made)) for _ in range(3))])
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, hidden: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each gate's weights and ids, ``[tokens, top_k]``."""
        everyone = torch.ones(len(hidden), dtype=torch.bool)
        return [layer.gate(hidden, everyone, None)[:2] for layer in self.layers[1:]]


def rows() -> torch.Tensor:
    return torch.from_numpy(made_routes(3, 6).materialize(6, "moe", "int64"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"softmax_before_topk": True},
        {"score_func": "sigmoid", "norm_topk_prob": True},
        {"score_func": "sigmoid", "n_expert_groups": 4, "n_limited_groups": 1, "route_scale": 2.5},
        {"score_func": "softmax_with_bias"},
        {"score_func": "sigmoid_with_bias", "force_e_score_correction_bias": True},
        {"score_func": "sqrtsoftplus"},
    ],
    ids=lambda changes: " ".join(str(v) for v in changes.values()) or "softmax",
)
def test_the_gates_use_the_rollouts_experts(changes: dict[str, Any]) -> None:
    """Goal: recorded ids, current weights, a gradient. Method: every way to score; replay of the gates' own choice is
    bit-exact; a drifted one reaches the experts in their order and every gate's parameters."""
    model, hidden = Model(**changes), torch.randn(6, HIDDEN)
    plain = model(hidden)
    with nemo_rl.automodel(model, torch.stack([ids for _, ids in plain], dim=1)):
        again = model(hidden)
    assert all(
        torch.equal(a, b) for one, other in zip(plain, again, strict=True) for a, b in zip(one, other, strict=True)
    )
    with nemo_rl.automodel(model, rows()):
        drifted = model(hidden)
        sum(weights.square().sum() for weights, _ in drifted).backward()
    for index, (_, ids) in enumerate(drifted):
        assert torch.equal(ids, rows()[:, index])
    assert all(bool(layer.gate.weight.grad.abs().sum() > 0) for layer in model.layers[1:])
    after = model(hidden)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(after, plain, strict=True))


def test_gates_of_another_model_are_left_alone() -> None:
    """Goal: Automodel's list has the gates of every model. Method: two models; Automodel refuses three rows for six
    gates; kvroute walks the model and addresses only that model's gates, and the other model goes on choosing."""
    RouterReplay.clear_registry()
    other, model = Model(), Model()
    hidden = torch.randn(6, HIDDEN)
    plain = other(hidden)
    with (
        pytest.raises(ValueError, match="Got 3 replay tensors but there are 6"),
        RouterReplay.replay(list(rows().unbind(1))),
    ):
        pass
    with nemo_rl.automodel(model, rows()):
        assert torch.equal(model(hidden)[0][1], rows()[:, 0])
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(other(hidden), plain, strict=True))


def test_one_replay_of_a_model_at_a_time() -> None:
    """Goal: no gate stops replaying in the middle of a block. Method: a second block of the same gates is refused and
    leaves the first one's rows; after it another is entered."""
    model, hidden = Model(), torch.randn(6, HIDDEN)
    with nemo_rl.automodel(model, rows()):
        with pytest.raises(ReplayError, match="no replay or recording"), nemo_rl.automodel(model, rows().flip(0)):
            pytest.fail("the block was entered")
        assert torch.equal(model(hidden)[0][1], rows()[:, 0])
    with nemo_rl.automodel(model, rows().flip(0)):
        assert torch.equal(model(hidden)[0][1], rows().flip(0)[:, 0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_elsewhere_is_an_error(reentrant: bool) -> None:
    """Goal: NeMo-Automodel 3156 and its kind: a recomputation never takes another's rows, or the gate's own choice.
    Method: a checkpointed model; backward in its block, behind it, and in another micro-batch's block."""
    model = Model()

    def loss() -> Any:
        hidden = torch.randn(6, HIDDEN, requires_grad=True)
        with torch.utils.checkpoint.set_checkpoint_early_stop(False):
            return torch.utils.checkpoint.checkpoint(weights, hidden, use_reentrant=reentrant)

    def weights(hidden: torch.Tensor) -> torch.Tensor:
        return torch.stack([weights for weights, _ in model(hidden)]).square().sum()

    used: list[torch.Tensor] = []
    model.layers[1].gate.register_forward_hook(lambda _gate, _inputs, answer: used.append(answer[1]))
    with nemo_rl.automodel(model, rows()):
        loss().backward()
        behind, inside = loss(), loss()
    assert len(used) == 4
    assert all(torch.equal(ids, rows()[:, 0]) for ids in used)
    wanted = "router of layer 1: wanted a backward pass inside the replay of its forward pass"
    with pytest.raises(ReplayError, match=wanted):
        behind.backward()
    with nemo_rl.automodel(model, rows().flip(0)), pytest.raises(ReplayError, match=wanted):
        (inside + loss()).backward()


def test_a_receipt_of_its_own_replay_and_of_ours() -> None:
    """Goal: what the gates really used, whoever replays. Method: kvroute's block, and Automodel's own as its docstring
    shows it, with a checkpoint: the backward pass behind the block computes again without replay, in silence
    (NeMo-Automodel 3156); and a pass in which its list of gates is of another model."""
    RouterReplay.clear_registry()
    model, hidden = Model(), torch.randn(6, HIDDEN, requires_grad=True)

    def loss() -> Any:
        def weights(hidden: torch.Tensor) -> torch.Tensor:
            return torch.stack([weights for weights, _ in model(hidden)]).square().sum()

        with torch.utils.checkpoint.set_checkpoint_early_stop(False):
            return torch.utils.checkpoint.checkpoint(weights, hidden, use_reentrant=True)

    with watch(model) as replayed:
        with nemo_rl.automodel(model, rows()):
            loss().backward()
        replayed.receipt().check()
        assert [(use.due, use.taken, use.repeated) for use in replayed.receipt().uses] == [((6,), (6,), (6,))] * 3
        replayed.due(rows(), [0] * 4 + [1] * 2)
        with RouterReplay.replay(list(rows().unbind(1))):
            late = loss()
        late.backward()
        gaps = replayed.receipt().gaps
        assert {(gap.micro_batch, gap.layer, gap.sample) for gap in gaps} == {
            (1, n, i) for n in (1, 2, 3) for i in (0, 1)
        }
        assert all(gap.wanted.endswith("when computed again") for gap in gaps)
        RouterReplay.clear_registry()
        Model()
        replayed.due(rows())
        with RouterReplay.replay(list(rows().unbind(1))):
            model(hidden)
    assert {(gap.micro_batch, gap.layer) for gap in replayed.receipt().gaps[len(gaps) :]} == {(2, n) for n in (1, 2, 3)}


def test_rows_that_do_not_fit_are_refused() -> None:
    """Goal: nothing is replayed by a refused call. Method: every misfit, and a model without replay."""
    model = Model()
    for wrong, message in [
        (rows()[:, :2], r"rows: wanted integers \[tokens, 3 layers, top_k\], got torch.int64 of shape \(6, 2, 4\)"),
        (rows().float(), "got torch.float32"),
        (torch.zeros_like(rows()), r"rows token 0 layer 1: wanted distinct ids, 0 or more, got \[0, 0, 0, 0\]"),
        (torch.from_numpy(np.full((6, 3, 4), -1)), r"got \[-1, -1, -1, -1\]"),
    ]:
        with pytest.raises(ReplayError, match=message), nemo_rl.automodel(model, wrong):
            pytest.fail("the block was entered")
    with (
        pytest.raises(ReplayError, match="gates with a replay object: enable_routing_replay, got none"),
        nemo_rl.automodel(Model(enable_routing_replay=False), rows()),
    ):
        pytest.fail("the block was entered")
    assert all(layer.gate.router_replay.target_indices is None for layer in model.layers[1:])
