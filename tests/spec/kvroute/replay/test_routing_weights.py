"""Routing weights beside their ids: captured bit for bit, kept in one record, and replayed as constants."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from cache_manager.errors import RowError
from kvroute import AuxBlocks, Namespace, Routes, RoutingWeights, open_store, routing_spec, routing_weights_spec
from kvroute.capture.capture import RoutingCapture, find_routers
from kvroute.capture.errors import CaptureError
from kvroute.replay import prime_rl
from kvroute.replay.rows import ReplayError
from kvroute.replay.transformers import packed, packed_weights, padded, padded_weights, replay
from kvroute.routes import SamplingSupport
from kvroute.routing import routing_spec_from_hf

TOKENS = torch.tensor([[5, 9, 13, 21, 33, 47, 8]])
BLOCK = 4


@contextmanager
def weights_seen(model: Any) -> Any:
    """The float arguments ``[tokens, top_k]`` of each layer's experts, watched independently of the capture."""
    seen: list[torch.Tensor] = []

    def look(_module: Any, given: tuple[Any, ...]) -> None:
        ids = next(t for t in given if not t.is_floating_point())
        (weights,) = (t for t in given if t.is_floating_point() and t.shape == ids.shape)
        seen.append(weights.detach().float().reshape(-1, weights.shape[-1]))

    hooks = [m.register_forward_pre_hook(look) for name, m in model.named_modules() if name.endswith(".experts")]
    yield seen
    for hook in hooks:
        hook.remove()


def specs_of(config: Any) -> list[Any]:
    ids = routing_spec_from_hf(config, block_tokens=BLOCK)
    return [ids, routing_weights_spec(ids)]


def captured(tiny: Any, tokens: torch.Tensor = TOKENS) -> RoutingWeights:
    """Of one pass, through blocks."""
    specs = specs_of(tiny.config)
    aux = AuxBlocks(specs, blocks=8, namespace=Namespace("m", weights_version=1))
    lives = aux.renew([2, 3])
    with RoutingCapture(tiny.model, *specs) as capture, capture.step(aux.begin_step, np.arange(8, 8 + tokens.numel())):
        tiny.forward(tokens)
    rows = [aux.read(spec.name, [2, 3], stop=tokens.numel(), generations=lives) for spec in specs]
    aux.close()
    return RoutingWeights.from_rows(specs[0], *rows)


def test_weights_are_the_bits_that_the_experts_were_given(tiny_moe: Any) -> None:
    """Goal: a weight is what an expert's output counts, for each id, in each family. Method: the experts' own
    arguments."""
    specs = specs_of(tiny_moe.config)
    with weights_seen(tiny_moe.model) as seen, RoutingCapture(tiny_moe.model, *specs) as capture:
        tiny_moe.forward(TOKENS)
        weights = capture.weights()
    assert weights.dtype == np.float32
    assert weights.shape == (TOKENS.numel(), *specs[0].row_shape)
    assert weights.tobytes() == torch.stack(seen, dim=1).numpy().tobytes()


def test_ids_and_weights_are_of_one_pass_or_missing(qwen: Any) -> None:
    """Goal: never one without the other, whatever becomes of the block. Method: a hit, a store, a block's next life, a
    pass that leaves ids alone, and new weights of the model."""
    specs, store = specs_of(qwen.config), open_store("memory:")
    aux = AuxBlocks(specs, blocks=8, namespace=Namespace("m", weights_version=1), store=store)
    lives = aux.renew([2, 3])

    def read(blocks: list[int], generations: Any) -> RoutingWeights:
        rows = [aux.read(spec.name, blocks, stop=7, generations=generations) for spec in specs]
        return RoutingWeights.from_rows(specs[0], *rows)

    with RoutingCapture(qwen.model, *specs) as capture:
        with capture.step(aux.begin_step, np.arange(8, 15)):
            qwen.forward(TOKENS)
        first = read([2, 3], lives)
        assert first == captured(qwen)
        assert first.routes.complete
        keys = aux.keys.keys([*TOKENS[0].tolist(), 1])
        assert all(aux.persist({keys[0]: 2}, lives[:1]).values())
        aux.renew([2, 3])
        assert not read([2, 3], lives).routes.known.any()
        lives = aux.renew([5])
        assert all(aux.restore({keys[0]: 5}, lives).values())
        rows = [aux.read(spec.name, [5], generations=lives) for spec in specs]
        back = RoutingWeights.from_rows(specs[0], *rows)
        assert back.weights.tobytes() == first.weights[:BLOCK].tobytes()
    aux.write_step([21], {specs[0].name: first.routes.ids[1:2]})
    rows = [aux.read(spec.name, [5], generations=lives) for spec in specs]
    one = RoutingWeights.from_rows(specs[0], *rows)
    assert one.routes.missing == ((1, 2),)
    assert np.isnan(one.weights[1]).all()
    aux.reset(weights_version=2)
    rows = [aux.read(spec.name, [5], generations=lives) for spec in specs]
    assert not RoutingWeights.from_rows(specs[0], *rows).routes.known.any()
    aux.close()


@contextmanager
def drifted(tiny: Any) -> Any:
    """The model with other, frozen routers."""
    routers = find_routers(tiny.model).values()
    parameters = [p for router in routers for p in router.parameters()]
    before = [p.detach().clone() for p in parameters]
    random = torch.Generator().manual_seed(5)
    for parameter in parameters:
        parameter.requires_grad_(False)
        parameter.copy_(torch.randn(parameter.shape, generator=random))
    yield
    for parameter, value in zip(parameters, before, strict=True):
        parameter.copy_(value)
        parameter.requires_grad_(True)


def test_constants_compute_the_rollout_whatever_the_router_is(tiny_moe: Any) -> None:
    """Goal: a frozen router's part of the pass is the rollout's own, bit for bit, and the experts' gradients are there.
    Method: the same model with random routers; ids alone do not give the rollout's logits. The last token has no row,
    so the pass is over one token more."""
    expected = tiny_moe.forward(TOKENS)
    record = captured(tiny_moe)
    more = torch.cat([TOKENS, torch.tensor([[17]])], dim=1)
    targets, constants = packed([record.routes], [8]), packed_weights([record], [8])
    assert torch.equal(constants.isnan(), targets < 0)
    mask = torch.tensor([[0] * 2 + [1] * 8])
    left_targets, left_constants = padded([record.routes], mask)[0, 2:], padded_weights([record], mask)[0, 2:]
    assert torch.equal(left_targets, targets)
    assert left_constants.numpy().tobytes() == constants.numpy().tobytes()
    with torch.no_grad(), drifted(tiny_moe):
        with replay(tiny_moe.model, targets, weights=constants):
            logits = tiny_moe.model(more, use_cache=False).logits[:, :7]
        with replay(tiny_moe.model, targets):
            ids_alone = tiny_moe.model(more, use_cache=False).logits[:, :7]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    if record.routes.top_k > 1:
        assert not torch.allclose(ids_alone, expected, rtol=1e-4, atol=1e-5)


def test_constants_have_no_gradient(qwen: Any) -> None:
    """Goal: experts are trained, and no router through its weights. Method: gradients of a replay."""
    record = captured(qwen)
    more = torch.cat([TOKENS, torch.tensor([[17]])], dim=1)
    with torch.no_grad(), drifted(qwen), torch.enable_grad():
        qwen.model.zero_grad()
        with replay(qwen.model, packed([record.routes], [8]), weights=packed_weights([record], [8])):
            qwen.model(more, use_cache=False).logits[:, :7].float().log_softmax(-1)[..., 0].sum().backward()
        has = {name for name, p in qwen.model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert any(".experts." in name for name in has)
    assert not any(".gate." in name for name in has)


def test_who_must_not_get_weights_is_refused_by_name(qwen: Any) -> None:
    record = captured(qwen)
    targets, constants = packed([record.routes], [8]), packed_weights([record], [8])
    with (
        pytest.raises(ReplayError, match="router of layer 1: wanted frozen parameters, as weights are constants"),
        replay(qwen.model, targets, weights=constants),
    ):
        pass
    with pytest.raises(ReplayError, match="frozen_router=True"):
        prime_rl.routed_experts_and_weights(record, 8, frozen_router=False)
    with torch.no_grad(), drifted(qwen):
        for wrong, message in (
            (constants.double(), "wanted float32"),
            (constants[:-1], r"weights: wanted float32 \[8, 2, 2\]"),
            (torch.where(constants.isnan(), 0.5, constants), "weights of token 7 layer 1: wanted finite"),
        ):
            with pytest.raises(ReplayError, match=message), replay(qwen.model, targets, weights=wrong):
                pass
    ids = specs_of(qwen.config)[0]
    with pytest.raises(CaptureError, match="spec of weights"):
        RoutingCapture(qwen.model, ids, routing_weights_spec(routing_spec(8, 2, (0, 1), 4, BLOCK)))
    with RoutingCapture(qwen.model, ids) as capture, pytest.raises(CaptureError, match="one of ids alone"):
        capture.weights()


def test_prime_rls_drafts_get_ids_and_bits_in_one_array(qwen: Any) -> None:
    """Method: their payload ``int32 [ids, float32 bits]`` taken apart by hand. Layers 0 and 2 have no router."""
    record = captured(qwen)
    answer = prime_rl.routed_experts_and_weights(record, 8, frozen_router=True)
    assert (answer["shape"], answer["dtype"]) == ([8, 4, 4], "int32")
    data = np.frombuffer(answer["data"], np.int32).reshape(answer["shape"])
    assert np.array_equal(data[:7, [1, 3], :2], record.routes.ids)
    assert np.ascontiguousarray(data[:7, [1, 3], 2:]).tobytes() == record.weights.tobytes()
    assert (data[:, [0, 2], 2:].copy().view(np.float32) == 0.5).all()
    lacks = RoutingWeights(record.routes.slice(0, 5), record.weights[:5])
    with pytest.raises(RowError, match="row 5: wanted a row"):
        prime_rl.routed_experts_and_weights(lacks, 8, frozen_router=True)


def test_supports_behind_a_sample_are_refused() -> None:
    support = SamplingSupport.of([[3], [4]], tokens=[1, 3, 4], start=1)
    assert prime_rl.sampling_mask(support, [False, True, True])["ids"] == np.array([3, 4], np.int32).tobytes()
    with pytest.raises(ReplayError, match="mask: wanted 3 tokens or more, as there are supports, got 2"):
        prime_rl.sampling_mask(support, [False, True])


def test_the_last_tokens_row_has_no_ones_ids_and_weights() -> None:
    """Goal: weights are of the ids beside them. Method: routes that go on behind the sample's last token."""
    ids = np.array([[[3, 1]], [[0, 2]], [[2, 3]]])
    routes = Routes(ids, [True] * 3, layer_ids=(1,), num_experts=4, num_layers=2)
    record = RoutingWeights(routes, np.arange(1, 7, dtype=np.float32).reshape(3, 1, 2))
    answer = prime_rl.routed_experts_and_weights(record, 3, frozen_router=True)
    data = np.frombuffer(answer["data"], np.int32).reshape(answer["shape"])
    assert data[..., :2].tolist() == [[[0, 0], [3, 1]], [[0, 0], [0, 2]], [[0, 1], [0, 1]]]
    weights = data[..., 2:].copy().view(np.float32)
    assert weights.tolist() == [[[0.5, 0.5], [1, 2]], [[0.5, 0.5], [3, 4]], [[0.5, 0.5], [0.5, 0.5]]]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.zeros((2, 1, 2)), r"wanted float32 \[2, 1, 2\], got float64"),
        (np.zeros((2, 1, 1), np.float32), r"got float32 \[2, 1, 1\]"),
        (np.array([[[1, 2]], [[1, np.inf]]], np.float32), "position 1 layer 0: wanted finite numbers"),
    ],
)
def test_weights_that_do_not_fit_their_ids_are_refused(weights: Any, message: str) -> None:
    routes = Routes(np.array([[[0, 1]], [[2, 3]]]), [True, True], layer_ids=(0,), num_experts=4, num_layers=1)
    with pytest.raises(RowError, match=message):
        RoutingWeights(routes, weights)
