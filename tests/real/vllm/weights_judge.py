"""The judge of routing weights: transformers' own routers, and what vLLM's kernels are given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import reference
from numpy.typing import NDArray

import kvroute
from kvroute.integrations.vllm import routing_weights

ROUNDING = {"float32": 2e-5, "bfloat16": 0.05}
"""Of a weight, between vLLM in that dtype and transformers in float32. Weights of other tokens are further off."""


def weights_by_transformers(home: Path, tokens: list[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The ids that the experts of a plain pass are given, sorted, and their weights: ``[tokens, layers, top_k]``."""
    seen = list[tuple[torch.Tensor, torch.Tensor]]()

    def look(_module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        ids = next(t for t in inputs if not t.is_floating_point())
        (weights,) = (t for t in inputs if t.is_floating_point() and t.shape == ids.shape)
        order = ids.argsort(-1)
        seen.append((ids.gather(-1, order), weights.float().gather(-1, order)))

    model = reference(home)
    hooks = [m.register_forward_pre_hook(look) for name, m in model.named_modules() if name.endswith(".experts")]
    try:
        with torch.no_grad():
            model(torch.tensor([tokens]), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    ids, weights = (torch.stack([layer[i].reshape(len(tokens), -1) for layer in seen], 1).numpy() for i in (0, 1))
    return ids.astype(np.int64), weights


def assert_weights_right(home: Path, output: Any, index: int = 0, dtype: str = "float32") -> kvroute.RoutingWeights:
    """Every weight of the answer is there, and is transformers' for its id within rounding."""
    tokens = [*output.prompt_token_ids, *output.outputs[index].token_ids]
    return _assert_right(home, routing_weights(output, index), tokens, dtype)


def assert_told_weights_right(home: Path, answer: dict[str, Any]) -> None:
    """The same of the one completion of an engine in another process."""
    (completion,) = answer["completions"]
    choice = {"index": 0, "prompt_token_ids": answer["prompt"], "token_ids": completion["tokens"]}
    found = routing_weights({"id": answer["id"], "kv_transfer_params": answer["params"], "choices": [choice]})
    _assert_right(home, found, [*answer["prompt"], *completion["tokens"]])


def _assert_right(
    home: Path, found: kvroute.RoutingWeights, tokens: list[int], dtype: str = "float32"
) -> kvroute.RoutingWeights:
    assert (found.routes.start, len(found)) == (0, len(tokens) - 1)
    ids, weights = weights_by_transformers(home, tokens)
    order = found.routes.ids.argsort(axis=-1)
    own_ids = np.take_along_axis(found.routes.ids, order, -1).astype(np.int64)
    own = np.take_along_axis(found.weights, order, -1)
    known = found.routes.known
    assert (own_ids == ids[:-1])[known].all()
    off = float(np.abs(own - weights[:-1])[known].max())
    assert off < ROUNDING[dtype], f"a weight is off by {off}"
    assert np.isnan(found.weights[~known]).all()
    return found


@contextmanager
def kernels_watched(engine: Any) -> Iterator[dict[int, list[tuple[torch.Tensor, torch.Tensor]]]]:
    """By layer, what vLLM's experts are given meanwhile: a copy of the ids and weights of each call."""
    model = engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.get_model()
    given: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    watched = []
    for _, module in model.named_modules():
        if not hasattr(module, "routed_experts") or not hasattr(module, "router"):
            continue
        calls = given.setdefault(module.layer_id, [])
        kernel = module.routed_experts.quant_method

        def look(*args: Any, calls: Any = calls, apply: Any = kernel.apply, **more: Any) -> Any:
            calls.append((more["topk_ids"].clone(), more["topk_weights"].clone()))
            return apply(*args, **more)

        watched.append(kernel)
        kernel.apply = look
    assert given
    try:
        yield given
    finally:
        for kernel in watched:
            del kernel.apply


def rows_given(calls: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """The ids and weights of one request's calls, one token after the other."""
    ids, weights = (torch.cat([call[i] for call in calls]) for i in (0, 1))
    return ids.numpy(), weights.numpy()
