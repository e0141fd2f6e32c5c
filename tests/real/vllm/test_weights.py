"""Routing weights beside the ids: what vLLM's kernels were given, bit for bit, and what a trainer gets of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from engines import BLOCK, prompts
from weights_judge import assert_weights_right, kernels_watched, rows_given

from kvroute.replay.prime_rl import routed_experts_and_weights

Start = Any  # conftest's Engines
Model = Callable[..., Path]
WITH_WEIGHTS = {"routing_weights": True}


def assert_bits_of_the_kernel(output: Any, given: Any, found: Any) -> None:
    """Behind what was hit, each id and each weight of the one request is what the experts were given."""
    rows = np.s_[output.num_cached_tokens or 0 :]
    for place, layer in enumerate(found.routes.layer_ids):
        ids, weights = rows_given(given[layer])
        assert (found.routes.ids[rows, place] == ids).all()
        assert found.weights[rows, place].tobytes() == weights.tobytes()
        given[layer].clear()


def test_weights_are_the_bits_that_the_kernel_was_given(engine: Start, model: Model) -> None:
    """Goal: ids and weights of one pass, of every token. Method: a copy of what vLLM's experts are given in each step
    of one request, in chunks; then the same prompt with a hit, whose rows are the bits of the first time; batches, also
    through preemption, against transformers; and prime-rl's array."""
    made = engine(
        model("qwen3_moe_dense_first"),
        settings=WITH_WEIGHTS,
        max_num_batched_tokens=96,
        num_gpu_blocks_override=16,
        max_model_len=256,
    )
    (asked,) = prompts(90, 150)
    with kernels_watched(made) as given:
        (first,) = made.ask([asked])
        found = assert_weights_right(made.home, first)
        assert_bits_of_the_kernel(first, given, found)
        (again,) = made.ask([[*asked, *first.outputs[0].token_ids, 7]])
        assert again.num_cached_tokens >= 150 // BLOCK * BLOCK
        hit = assert_weights_right(made.home, again)
        assert_bits_of_the_kernel(again, given, hit)
        whole = np.s_[: again.num_cached_tokens]
        assert hit.weights[whole].tobytes() == found.weights[whole].tobytes()
        assert (hit.routes.ids[whole] == found.routes.ids[whole]).all()
    made.assert_right(made.ask(prompts(91, *[40] * 12), max_tokens=80))
    assert made.metric("num_preemptions") > 0

    sample = routed_experts_and_weights(found, len(asked) + 20, frozen_router=True)
    array = np.frombuffer(sample["data"], sample["dtype"]).reshape(sample["shape"])
    top_k = found.routes.top_k
    assert sample["shape"] == [170, found.routes.num_layers, 2 * top_k]
    layers = list(found.routes.layer_ids)
    assert (array[:-1, layers, :top_k] == found.routes.ids).all()
    assert array[:-1, layers, top_k:].tobytes() == found.weights.tobytes()
