"""What vLLM's experts are given, recorded by a plugin of the experiments: no code of kvroute is on the way.

With :data:`RECORD` in the environment the kernel of every layer's experts first copies its ids and weights to memory of
its own, in CUDA graphs too, and behind each step they are written to that file: for each token a hash of all tokens up
to there, then the ids int32 and the bits of the weights, ``[layers, top_k]`` each.
"""

from __future__ import annotations

import os
from functools import wraps
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch

RECORD = "KVROUTE_BENCH_RECORD"
HASH_NBYTES = 16
TOKENS_MAX = 16384
"""Of a step."""


def hashes(tokens: list[int], first: int) -> list[bytes]:
    """Of each token from ``first`` on: a hash of all tokens up to it."""
    hasher = blake2b(np.array(tokens[:first], np.int32).tobytes(), digest_size=HASH_NBYTES)
    digests = []
    for token in tokens[first:]:
        hasher.update(np.int32(token).tobytes())
        digests.append(hasher.digest())
    return digests


class Recorder:
    """The choices of the current step, by layer, and the tokens of each request."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._tokens: dict[str, list[int]] = {}

    def keep(self, layer: int, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Copy a layer's choice ``[tokens, top_k]``, on the stream of its kernel."""
        if layer not in self._kept:
            shape = TOKENS_MAX, ids.shape[1]
            made = (torch.full(shape, -1, dtype=dtype, device=ids.device) for dtype in (torch.int32, torch.float32))
            assert not (ids.is_cuda and torch.cuda.is_current_stream_capturing()), "memory of one graph alone"
            self._kept[layer] = next(made), next(made)
        assert weights.dtype == torch.float32, weights.dtype
        for target, source in zip(self._kept[layer], (ids, weights), strict=True):
            target[: len(source)].copy_(source)

    def write(self, requests: list[tuple[str, int]], tokens: list[int], positions: list[int]) -> None:
        """The step of ``requests``, name and number of tokens each, is over."""
        layers = [self._kept[layer] for layer in sorted(self._kept)]
        count = len(tokens)
        choices = [torch.stack([kept[i][:count] for kept in layers], 1).cpu().numpy() for i in (0, 1)]
        rows = np.concatenate([choices[0], choices[1].view(np.int32)], 1)
        first = 0
        with self._path.open("ab") as file:
            for name, number in requests:
                known, start = self._tokens[name], positions[first]
                for token, position in zip(tokens[first : first + number], positions[first:], strict=False):
                    if position == len(known):
                        known.append(token)
                    assert known[position] == token, f"{name}: {token} at {position}, not {known[position]}"
                digests = hashes(known[: start + number], start)
                for digest, row in zip(digests, rows[first : first + number], strict=True):
                    file.write(digest + row.tobytes())
                first += number

    def begin(self, step: Any) -> None:
        """A step of vLLM's scheduler: which requests are new."""
        for name in step.finished_req_ids:
            self._tokens.pop(name, None)
        for request in step.scheduled_new_reqs:
            self._tokens.setdefault(request.req_id, list(request.prompt_token_ids))  # V2 says again that one resumes


def batch_of(runner: Any, step: Any) -> tuple[list[tuple[str, int]], Any, Any]:
    """The requests of a step that is over, in the order of their tokens; the tokens and their positions."""
    batch = getattr(runner.execute_model_state, "input_batch", None)
    if batch is not None:  # Model Runner V2
        counts = batch.num_scheduled_tokens.tolist()
        return list(zip(batch.req_ids, counts, strict=True)), batch.input_ids, batch.positions
    names = [name for name in runner.input_batch.req_ids if name in step.num_scheduled_tokens]
    values = [getattr(value, "gpu", value) for value in (runner.input_ids, runner.positions)]
    return [(name, step.num_scheduled_tokens[name]) for name in names], *values


def record() -> None:
    """A plugin of vLLM, called in each of its processes before a model is made, maybe more than once."""
    path = os.environ.get(RECORD)
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if not path or hasattr(UnquantizedFusedMoEMethod.apply, "__wrapped__"):
        return
    recorder = Recorder(Path(path))
    apply = UnquantizedFusedMoEMethod.apply

    @wraps(apply)
    def given(self: Any, *args: Any, **named: Any) -> Any:
        layer = int(named["layer"].layer_name.split("layers.")[1].split(".")[0])
        recorder.keep(layer, named["topk_ids"], named["topk_weights"])
        return apply(self, *args, **named)

    UnquantizedFusedMoEMethod.apply = given
    for kind in (GPUModelRunner, model_runner.GPUModelRunner):
        kind.execute_model = behind(kind.execute_model, recorder)


def behind(execute: Any, recorder: Recorder) -> Any:
    """``execute_model`` of a runner, behind which the step is recorded."""

    @wraps(execute)
    def executed(self: Any, step: Any, *args: Any, **named: Any) -> Any:
        output = execute(self, step, *args, **named)
        if named.get("dummy_run"):
            return output
        recorder.begin(step)
        if step.total_num_scheduled_tokens and self.execute_model_state is not None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            requests, tokens, positions = batch_of(self, step)
            count = step.total_num_scheduled_tokens
            recorder.write(requests, tokens[:count].tolist(), positions[:count].tolist())
        return output

    return executed
