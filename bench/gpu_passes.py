"""Forward passes for ``bench.gpu_capture``: matrix work, routers' answers, and the blocks that take the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import kvroute
from kvroute.capture.layers import LayerCapture

BLOCK_TOKENS, BLOCKS, HIDDEN, TOP_K = 64, 1024, 2048, 8
TOKENS = (1, 64, 256, 1024, 8192, 16384)
SOAK_ROWS, SOAK_TOKENS = 10_000_000, (64, 256, 1024)
SLOTS = BLOCKS * BLOCK_TOKENS
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Model:
    name: str
    layers: int
    experts: int


MODELS = (Model("58x8 of 256", 58, 256), Model("94x8 of 128", 94, 128), Model("60x8 of 384", 60, 384))


class Pass:
    """A model's rows, its routers' answers for one batch size, and a pass's matrix work if it ``works``."""

    works = True

    def __init__(self, model: Model, tokens: int) -> None:
        self.model, self.tokens = model, tokens
        self.ids = torch.empty(model.layers, tokens, TOP_K, dtype=torch.int32, device=DEVICE)
        self.draw()
        self.slots = torch.zeros(tokens, dtype=torch.int64, device=DEVICE)
        self.x = torch.randn(tokens, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
        self.w = torch.randn(HIDDEN, HIDDEN, device=DEVICE, dtype=torch.bfloat16) / HIDDEN**0.5

    def draw(self) -> None:
        """Other ids, each once in a row: a random start and distinct steps."""
        experts = self.model.experts
        start = torch.randint(0, experts, self.ids.shape[:2], device=DEVICE, dtype=torch.int32)
        steps = torch.randint(1, experts // TOP_K, self.ids.shape, device=DEVICE, dtype=torch.int32).cumsum(-1)
        self.ids.copy_((start[..., None] + steps) % experts)

    def work(self, each: Callable[[int], None] | None = None) -> None:
        y = self.x
        for layer in range(self.model.layers):
            y = y @ self.w if self.works else y
            if each is not None:
                each(layer)

    def wanted(self) -> Any:
        """``[tokens, layers, top_k]`` as numpy."""
        return self.ids.transpose(0, 1).cpu().numpy()


@contextmanager
def blocks_of(model: Model, *, staged: bool = False) -> Iterator[tuple[Any, Any]]:
    """Blocks in shared memory, all of them given out, and a capture that writes into them."""
    spec = kvroute.routing_spec(model.experts, TOP_K, range(model.layers), model.layers, BLOCK_TOKENS)
    namespace = kvroute.Namespace("bench", weights_version=0)
    with kvroute.AuxBlocks([spec], blocks=BLOCKS, namespace=namespace, memory="shared") as aux:
        aux.renew(range(BLOCKS))
        with LayerCapture(aux.region("device"), max(TOKENS), DEVICE, staged=staged) as capture:
            yield aux, capture


def graph_of(launches: Callable[[], object], pool: Any = None) -> torch.cuda.CUDAGraph:
    """A graph of ``launches``. Those of one ``pool`` have their matrices in the same memory, one behind the other."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            launches()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        launches()
    return graph


def random_slots(tokens: int, rng: np.random.Generator, padding: float = 0.0, *, apart: bool = False) -> Any:
    """Prefill: whole blocks anywhere. Decode: anywhere, or ``apart``, as each sequence's. Some of them padding."""
    if tokens <= SOAK_TOKENS[-1] and apart:
        slots = rng.permutation(BLOCKS)[:tokens] * BLOCK_TOKENS + rng.integers(0, BLOCK_TOKENS, tokens)
    elif tokens <= SOAK_TOKENS[-1]:
        slots = rng.choice(SLOTS, tokens, replace=False)
    else:
        slots = (
            rng.permutation(BLOCKS)[: tokens // BLOCK_TOKENS, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)
        ).ravel()
    if padding:
        slots[rng.random(tokens) < padding] = -1
    return slots.astype(np.int64)


def keep_all(capture: Any, batch: Pass) -> None:
    for layer in range(batch.model.layers):
        capture.hook(layer)(batch.ids[layer])
