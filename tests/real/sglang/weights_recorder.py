"""The judge of routing weights: what SGLang's own kernels were given, pass by pass, and transformers' routers."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
from weights_judge import ROUNDING, weights_by_transformers

from kvroute import Routes, RoutingWeights


def recording(path: Path) -> None:
    """From here on, passes of engines that this process forks write to ``path`` what the kernels of their experts are
    given: the tokens, their positions, and by layer ids and the bits of weights ``[tokens, top_k]``.

    Nothing of kvroute's is looked at, and nothing of it is between this and the kernel.
    """
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
    from sglang.srt.model_executor.model_runner import ModelRunner

    layers = dict[int, tuple[Any, Any]]()
    apply, forward = UnquantizedFusedMoEMethod.apply, ModelRunner.forward

    @wraps(apply)
    def given(self: Any, layer: Any, dispatch_output: Any, *more: Any, **named: Any) -> Any:
        choice = dispatch_output.topk_output
        ids, weights = choice.topk_ids.int().tolist(), choice.topk_weights.numpy().view(np.uint32).tolist()
        layers[layer.layer_id] = (ids, weights)
        return apply(self, layer, dispatch_output, *more, **named)

    @wraps(forward)
    def passed(self: Any, batch: Any, *more: Any, **named: Any) -> Any:
        layers.clear()
        done = forward(self, batch, *more, **named)
        if layers:
            columns = batch.input_ids.tolist(), batch.positions.tolist()
            with path.open("a") as file:
                file.write(json.dumps([*columns, [[layer, *layers[layer]] for layer in sorted(layers)]]) + "\n")
        return done

    UnquantizedFusedMoEMethod.apply, ModelRunner.forward = given, passed


def judge_weights(path: Path, homes: Sequence[Path], answers: Sequence[dict[str, Any]]) -> dict[str, Counter[str]]:
    """By scenario how many weights of ids are ``right``, and how many ids are ``missing`` with their weights.

    A row is right if some pass gave the kernels these ids with these very bits, for this token at this position, and if
    the ids are transformers' for this prefix, by the weights of one of ``homes``, and the weights within rounding;
    without ``homes``, as where KV and tokens are of different weights, the bits alone are judged.
    Raises :class:`AssertionError` for any other.
    """
    given = defaultdict[tuple[int, int, int], set[bytes]](set)
    with path.open() as file:
        for line in file:
            tokens, positions, layers = json.loads(line)
            for layer, ids, bits in layers:
                for token, position, row, weights in zip(tokens, positions, ids, bits, strict=False):
                    given[layer, token, position].add(np.array([row, weights], np.uint32).tobytes())
    counts = defaultdict[str, Counter[str]](Counter)
    for answer in answers:
        found = RoutingWeights.from_json(Routes.from_json(answer["routes"]), answer["weights"])
        tokens = [*answer["prompt"], *answer["tokens"]]
        expected = [weights_by_transformers(home, tokens) for home in homes]
        order = found.routes.ids.argsort(axis=-1)
        sorted_ids = np.take_along_axis(found.routes.ids, order, -1).astype(np.int64)
        sorted_weights = np.take_along_axis(found.weights, order, -1)
        assert (found.routes.start, found.routes.stop) == (answer["start"], len(tokens) - 1)
        for row, place in np.ndindex(found.routes.known.shape):
            if not found.routes.known[row, place]:
                assert np.isnan(found.weights[row, place]).all()
                counts[answer["scenario"]]["missing"] += found.routes.top_k
                continue
            position, layer = found.routes.start + row, found.routes.layer_ids[place]
            ids, weights = found.routes.ids[row, place], found.weights[row, place]
            bits = np.array([ids.astype(np.uint32), weights.view(np.uint32)]).tobytes()
            where = answer["scenario"], position, layer
            assert bits in given[layer, tokens[position], position], f"{where}: bits that no kernel was given"
            assert not homes or any(
                (sorted_ids[row, place] == its_ids[position, place]).all()
                and np.abs(sorted_weights[row, place] - its_weights[position, place]).max() < ROUNDING["float32"]
                for its_ids, its_weights in expected
            ), f"{where}: ids or weights that transformers does not choose"
            counts[answer["scenario"]]["right"] += found.routes.top_k
    return dict(counts)
