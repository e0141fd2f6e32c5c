"""From a model's forward passes through the blocks to routes: the path that an engine takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import kvroute
from kvroute.capture.canary import canary_rows, canary_spec
from kvroute.capture.capture import RoutingCapture

BLOCK_TOKENS, BLOCKS = 4, [5, 2, 7]
TOKENS = torch.tensor([[5, 9, 13, 21, 33, 47, 8, 3, 60, 11]])


def prefill(tiny: Any, spec: kvroute.AuxBlockDataSpec, aux: kvroute.AuxBlocks, *, chunks: list[int]) -> None:
    """Forward ``TOKENS`` in chunks through the KV cache of transformers, writing each chunk's rows to its slots."""
    positions = np.arange(TOKENS.shape[1])
    slots = np.array(BLOCKS)[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
    past, start = None, 0
    with RoutingCapture(tiny.model, spec) as capture, torch.no_grad():
        for stop in chunks:
            past = tiny.model(TOKENS[:, start:stop], past_key_values=past, use_cache=True).past_key_values
            with aux.begin_step(slots[start:stop]) as step:
                step.write("routing", capture.rows(positions=positions[start:stop]))
            capture.clear()
            start = stop


def blocks_for(spec: kvroute.AuxBlockDataSpec) -> kvroute.AuxBlocks:
    aux = kvroute.AuxBlocks([spec], blocks=8, namespace=kvroute.Namespace("tiny", weights_version=3))
    aux.renew(BLOCKS)
    return aux


def test_routes_are_the_rows_of_one_pass_over_the_whole_sequence(qwen: Any) -> None:
    """Goal: chunking and paging lose nothing. Method: the same tokens once more, in one pass without blocks."""
    spec = kvroute.routing_spec_from_hf(qwen.config, BLOCK_TOKENS)
    aux = blocks_for(spec)
    prefill(qwen, spec, aux, chunks=[3, 7, 9])
    routes = kvroute.Routes.from_rows(spec, aux.read("routing", BLOCKS, start=0, stop=10), weights_version=3)
    with RoutingCapture(qwen.model, spec) as capture:
        qwen.forward(TOKENS)
        whole = capture.rows()
    assert np.array_equal(routes.ids[:9], whole[:9])
    assert (routes.missing, routes.layer_ids, routes.weights_versions) == (((9, 10),), (1, 3), ((0, 10, 3),))
    assert routes.slice(0, 9).complete
    later = kvroute.Routes.from_rows(spec, aux.read("routing", BLOCKS, start=4, stop=9), start=4, weights_version=3)
    read = TOKENS[0, :9].numpy()
    assert routes.slice(0, 4).append(later, tokens=read) == routes.slice(0, 9).bind(read)
    aux.close()


def test_canaries_come_back_where_they_belong(qwen: Any) -> None:
    spec = canary_spec(kvroute.routing_spec_from_hf(qwen.config, BLOCK_TOKENS))
    aux = blocks_for(spec)
    prefill(qwen, spec, aux, chunks=[4, 10])
    routes = kvroute.Routes.from_rows(spec, aux.read("routing", BLOCKS, start=2, stop=10), start=2)
    assert np.array_equal(routes.ids, canary_rows(spec, np.arange(2, 10)))
    aux.close()
