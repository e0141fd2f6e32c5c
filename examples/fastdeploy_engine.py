"""A FastDeploy-like engine with kvroute: block tables, chunks of prompts, preemption by swap, and rollouts.

It has no model. What its routers choose was recorded: the experts of each request's positions, from a small model of
transformers. So each row that a trainer reads can be compared with the one that was recorded.

Run it:     python examples/fastdeploy_engine.py --routing-replay-config '{"enable_routing_replay": true}'
Record it:  python examples/fastdeploy_engine.py --record
"""

from __future__ import annotations

import argparse
import sys
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import KVRouteError
from cache_manager.keys import Namespace
from cache_manager.spec import AuxBlockDataSpec
from kvroute.integrations.fastdeploy import RoutingReplayConfig, RoutingReplayManager
from kvroute.rollout import RolloutHandle, fetch_shard
from kvroute.routes import Routes, Split
from kvroute.routing import routing_spec

RECORDING: Final = Path(__file__).with_name("fastdeploy_recording.npz")
BLOCK_TOKENS: Final = 16
GPU_BLOCKS: Final = 20
CPU_BLOCKS: Final = 20
STEP_TOKENS: Final = 48
"""The most tokens that one step computes."""


@dataclass
class Request:
    """A request of a recording: its routers choose ``experts [tokens, layers, top_k]``. Half of it is its prompt."""

    user: str
    experts: NDArray[np.uint8]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)  # its block table; of the CPU's blocks while it is swapped out
    lives: list[int] = field(default_factory=list)
    swapped: bool = False

    @property
    def next_stop(self) -> int:
        """Behind what is computed next: the prompt, or the next token of the answer."""
        return max(len(self.experts) // 2, self.computed + 1)

    @property
    def id(self) -> str:
        """As FastDeploy's server makes it of the client's ``user``."""
        return f"chatcmpl-{self.user}-{uuid.uuid4()}_0"


class RecordedEngine:
    """Serves the requests of a recording in their order; the latest one is swapped out when blocks run out."""

    def __init__(self, spec: AuxBlockDataSpec, requests: Sequence[Request], manager: RoutingReplayManager) -> None:
        self.aux = AuxBlocks(
            [spec], blocks=GPU_BLOCKS, host_blocks=CPU_BLOCKS, namespace=Namespace("recorded", 0), memory="shared"
        )
        self.swaps = self.steps = 0
        self.rollouts: dict[str, Future[RolloutHandle]] = {}
        self._spec, self._manager = spec, manager
        self._waiting = list(requests)
        self._running: list[Request] = []
        self._free_gpu = list(range(GPU_BLOCKS))
        self._free_cpu = list(range(CPU_BLOCKS))

    def run(self) -> None:
        while self._waiting or self._running:
            self._admit()
            self._step()
            for request in [each for each in self._running if each.computed == len(each.experts)]:
                self._finish(request)
        self.aux.close()

    def _admit(self) -> None:
        """Swap in, or begin, the next request if there is a block more than it has."""
        while self._waiting and len(self._free_gpu) > len(self._waiting[0].blocks):
            request = self._waiting.pop(0)
            if request.swapped:
                gpu = self._given(len(request.blocks))
                self.aux.swap_in(list(zip(request.blocks, gpu, strict=True)))
                self._free_cpu += request.blocks
                request.blocks, request.swapped = gpu, False
                request.lives = self.aux.generations(gpu).tolist()
            self._running.append(request)

    def _given(self, count: int) -> list[int]:
        """Free blocks, which begin new lives: rows of earlier owners are gone."""
        blocks, self._free_gpu = self._free_gpu[:count], self._free_gpu[count:]
        self.aux.renew(blocks)
        return blocks

    def _step(self) -> None:
        """One forward pass over chunks of the running requests."""
        slots: list[NDArray[np.int64]] = []
        experts: list[NDArray[np.uint8]] = []
        budget = STEP_TOKENS
        for request in list(self._running):
            stop = min(request.computed + budget, request.next_stop)
            if request not in self._running or not budget or not self._make_room(request, stop):
                continue
            positions = np.arange(request.computed, stop)
            slots.append(np.array(request.blocks)[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS)
            experts.append(request.experts[positions])
            request.computed = stop
            budget -= len(positions)
        self.aux.write_step(np.concatenate(slots), {self._spec.name: np.concatenate(experts)})
        self.steps += 1

    def _make_room(self, request: Request, stop: int) -> bool:
        """Blocks for the positions up to ``stop``; later requests are swapped out for it. ``False``: it went itself."""
        needed = -(-stop // BLOCK_TOKENS) - len(request.blocks)
        while needed > len(self._free_gpu):
            victim = self._running.pop()
            cpu, self._free_cpu = self._free_cpu[: len(victim.blocks)], self._free_cpu[len(victim.blocks) :]
            self.aux.swap_out(list(zip(victim.blocks, cpu, strict=True)))
            self._free_gpu += victim.blocks
            victim.blocks, victim.swapped = cpu, True
            self._waiting.insert(0, victim)
            self.swaps += 1
            if victim is request:
                return False
        given = self._given(max(0, needed))
        request.blocks += given
        request.lives += self.aux.generations(given).tolist()
        return True

    def _finish(self, request: Request) -> None:
        """The request's rows become a rollout; the last token was sampled and never computed."""
        rows = self.aux.read(self._spec.name, request.blocks, 0, request.computed, generations=request.lives)
        self.rollouts[request.user] = self._manager.submit(request.id, Routes.from_rows(self._spec, rows))
        self._running.remove(request)
        self._free_gpu += request.blocks


def recorded() -> tuple[AuxBlockDataSpec, list[Request]]:
    """The recording: the routing spec, and the requests."""
    with np.load(RECORDING) as arrays:
        experts, lengths, layer_ids = arrays["experts"], arrays["lengths"], arrays["layer_ids"].tolist()
        parts = np.split(experts, np.cumsum(lengths)[:-1])
        spec = routing_spec(
            num_experts=int(arrays["num_experts"]),
            top_k=experts.shape[2],
            layer_ids=layer_ids,
            num_layers=int(arrays["num_layers"]),
            block_tokens=BLOCK_TOKENS,
        )
    return spec, [Request(f"recorded_{i}:0:0:0", part) for i, part in enumerate(parts)]


def record() -> None:
    """Run a small model of transformers with seeded weights over seeded prompts, and keep what its routers chose."""
    import torch

    from kvroute.capture.capture import RoutingCapture
    from kvroute.routing import routing_spec_from_hf
    from paged_engine.models import build_model

    model: Any = build_model("qwen3_moe", seed=0, vocab_size=512)
    spec = routing_spec_from_hf(model.config, BLOCK_TOKENS)
    rng = np.random.default_rng(0)
    lengths = rng.integers(20, 140, 12)
    parts: list[NDArray[Any]] = []
    with torch.no_grad():
        for length in lengths.tolist():
            tokens = torch.from_numpy(rng.integers(3, 512, (1, length)))
            with RoutingCapture(model, spec) as capture:
                model(tokens, use_cache=False)
                parts.append(capture.rows())
    np.savez_compressed(
        RECORDING,
        experts=np.concatenate(parts).astype(np.uint8),
        lengths=lengths,
        layer_ids=np.array(spec.attrs["layer_ids"]),
        num_layers=spec.attrs["num_layers"],
        num_experts=spec.attrs["num_experts"],
    )


def main(config: str) -> int:
    """The exit status: 0 if a trainer reads every row as it was recorded."""
    spec, requests = recorded()
    wrong = compared = 0
    with RoutingReplayManager(RoutingReplayConfig.from_json(config), spec) as manager:
        engine = RecordedEngine(spec, requests, manager)
        engine.run()
        for request in requests:
            handle = engine.rollouts[request.user].result(60.0)
            rows = fetch_shard(manager.store, [handle], [len(request.experts) + 1], Split(), "uint8")
            compared += rows[:-1].size
            wrong += int((rows[:-1] != request.experts).sum())
    print(f"{len(requests)} requests in {engine.steps} steps, {engine.swaps} swapped out")
    print(f"{compared} expert ids that a trainer reads from {manager.config.rollout_url}: {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--routing-replay-config", default='{"enable_routing_replay": true}', metavar="JSON")
    parser.add_argument("--record", action="store_true", help="make the recording anew")
    given = parser.parse_args()
    if given.record:
        record()
        sys.exit(0)
    try:
        sys.exit(main(given.routing_replay_config))
    except KVRouteError as error:
        sys.exit(str(error))
