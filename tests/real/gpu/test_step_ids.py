"""Ids and weights of one pass on a GPU, in CUDA graphs: the bits that the routers gave, by one launch over all layers.

``TRITON_INTERPRET=0 pytest tests/real/gpu``. Without a CUDA GPU these are skipped; what is stacked is tested
everywhere, in memory of the host.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from kvroute.capture.step_ids import NO_ID, StepIds
from kvroute.routing import routing_spec

if not torch.cuda.is_available():
    pytest.skip("wanted a CUDA GPU, torch sees none here", allow_module_level=True)

LAYERS, EXPERTS, TOP_K, TOKENS = 60, 128, 8, 256
SPEC = routing_spec(EXPERTS, TOP_K, range(LAYERS), LAYERS, block_tokens=16)
DEVICE = torch.device("cuda")


class Routers:
    """Routers of all layers that compute their choices from ``logits [layers, tokens, experts]``, as an engine's do: in
    memory of their own, which the allocator gives out again when nothing refers to it. ``scale``: a factor behind."""

    def __init__(self, step: StepIds, tokens: int, scale: float = 1.0, *, halves: bool = False) -> None:
        self.logits = torch.zeros(LAYERS, tokens, EXPERTS, device=DEVICE)
        self.given = torch.zeros(2, LAYERS, tokens, TOP_K, dtype=torch.int32, device=DEVICE)  # ids, bits of weights
        self._hooks = [(step.hook(layer), step.hook_weights(layer)) for layer in range(LAYERS)]
        self._scale = scale
        self._halves = halves

    def route(self, first: int = 0, stop: int = LAYERS) -> None:
        """Pass through these layers."""
        for layer in range(first, stop):
            weights, ids = self.logits[layer].softmax(-1).topk(TOP_K)
            self.given[0, layer].copy_(ids)
            kept = weights if self._scale == 1.0 else weights * self._scale
            self.given[1, layer].copy_(kept.view(torch.int32))
            keep_ids, keep_weights = self._hooks[layer]
            keep_ids(ids.to(torch.int32))
            keep_weights(kept.half() if self._halves else kept)
            del weights, ids, kept
            torch.zeros(self.logits.shape[1], TOP_K, device=DEVICE).fill_(3)  # takes freed memory

    def graphs(self, pieces: int) -> list[torch.cuda.CUDAGraph]:
        """A pass in so many graphs of one pool, as an engine's between layers of attention."""
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            self.route()
        torch.cuda.synchronize()
        bounds = np.linspace(0, LAYERS, pieces + 1).astype(int).tolist()
        graphs = list[torch.cuda.CUDAGraph]()
        pool = torch.cuda.graph_pool_handle()
        for first, stop in pairwise(bounds):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self.route(first, stop)
            graphs.append(graph)
        return graphs


def assert_given(step: StepIds, taken: Any, routers: Routers, tokens: int) -> None:
    assert isinstance(taken, torch.Tensor)
    ids, weights = step.split(taken.cpu().numpy())
    wanted = routers.given[:, :, :tokens].transpose(1, 2).cpu().numpy()
    assert (ids == wanted[0]).all()
    assert weights.tobytes() == wanted[1].tobytes()


@pytest.mark.parametrize("pieces", [0, 1, 7])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_weights_and_ids_are_those_of_the_pass_in_any_graph(pieces: int, scale: float) -> None:
    """Goal: bit for bit what routers gave in this very pass. Method: passes with other inputs, of two sizes, in turn:
    without a graph, in one, and in seven pieces; the routers copy what they give by themselves."""
    step = StepIds(SPEC, TOKENS, DEVICE, weights=True)
    sizes = TOKENS, 64
    routers = {tokens: Routers(step, tokens, scale) for tokens in sizes}
    graphs = {tokens: routers[tokens].graphs(pieces) if pieces else [] for tokens in sizes}
    for turn in range(12):
        tokens = sizes[turn % 2]
        routers[tokens].logits.normal_()
        step.begin()
        for graph in graphs[tokens]:
            graph.replay()
        if not pieces:
            routers[tokens].route()
        used = tokens - 5 * (turn % 3)  # the others are padding
        taken = step.take(used)
        kept = taken.clone() if isinstance(taken, torch.Tensor) else taken
        step.begin()  # the copy was launched before: what is emptied now is not in it
        assert_given(step, kept, routers[tokens], used)


def test_a_pass_without_weights_of_its_own_has_neither() -> None:
    """Goal: never one without the other, and never those of the step before. Method: behind a right pass, one in a
    graph whose weights are of another type, and one that is half done."""
    step = StepIds(SPEC, TOKENS, DEVICE, weights=True)
    right = Routers(step, 64)
    odd = Routers(step, 64, halves=True)
    (graph,) = odd.graphs(1)
    for wrong in (graph.replay, lambda: right.route(0, LAYERS - 1)):
        step.begin()
        right.logits.normal_()
        right.route()
        assert_given(step, step.take(64), right, 64)
        step.begin()
        wrong()
        taken = step.take(64)
        assert isinstance(taken, torch.Tensor)
        assert (taken == NO_ID).all()
        step.begin()


def test_layers_are_not_stacked_one_by_one() -> None:
    """Goal: weights cost no launch a layer. Method: the launches of a pass's hooks, as the profiler counts them; torch
    decides how many tensors it stacks at once."""
    step = StepIds(routing_spec(EXPERTS, TOP_K, range(48), 48, block_tokens=16), TOKENS, DEVICE, weights=True)
    ids = [torch.zeros(64, TOP_K, dtype=torch.int32, device=DEVICE) for _ in range(48)]
    weights = [torch.rand(64, TOP_K, device=DEVICE) for _ in range(48)]
    step.begin()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for layer in range(48):
            step.hook(layer)(ids[layer])
            step.hook_weights(layer)(weights[layer])
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert 1 <= len(kernels) <= 2, [event.name for event in kernels]
