"""``python -m kvroute.capture.probe``: what a capture step costs on this machine's GPU, registered and staged, as JSON.

``kvroute doctor`` asks this in a process of its own, because torch and a CUDA context are much for a doctor.
"""

from __future__ import annotations

import json
import statistics
import time

import numpy as np
import torch

from cache_manager.blocks import AuxBlocks
from cache_manager.keys import Namespace
from kvroute.capture.host_memory import RegistrationError
from kvroute.capture.layers import LayerCapture
from kvroute.routing import routing_spec

LAYERS, TOP_K, EXPERTS, BLOCK_TOKENS, TOKENS, STEPS = 58, 8, 256, 64, 256, 40
"""A decode step of 256 sequences of a model like DeepSeek-V3."""


def step_us(blocks: AuxBlocks, device: str, *, staged: bool) -> float:
    """Microseconds from the hooks to readable rows, the device waited for: the median of ``STEPS`` steps."""
    slots = np.arange(TOKENS, dtype=np.int64) * BLOCK_TOKENS
    ids = torch.rand(LAYERS, TOKENS, EXPERTS, device=device).argsort(-1)[..., :TOP_K].to(torch.int32)
    at = torch.from_numpy(slots).to(device)
    taken = []
    with LayerCapture(blocks.region("device"), TOKENS, device, staged=staged) as capture:
        hooks = [capture.hook(layer) for layer in range(LAYERS)]
        for _ in range(STEPS + 3):
            began = time.perf_counter()
            step = blocks.begin_step(slots, in_place=True)
            for hook, layer_ids in zip(hooks, ids, strict=True):
                hook(layer_ids)
            capture.commit(at)
            if at.is_cuda:
                torch.cuda.synchronize()
            step.wrote("routing")
            step.commit(capture.verdict(TOKENS).keep)
            taken.append(1e6 * (time.perf_counter() - began))
    rows = blocks.read("routing", range(TOKENS), 0, TOKENS * BLOCK_TOKENS)
    assert (rows.values[slots] == ids.transpose(0, 1).cpu().numpy()).all(), "rows are what the routers chose"
    return statistics.median(taken[3:])


def probe(device: str) -> dict[str, float | str]:
    """``registered_us`` and ``staged_us``, ``device``, and ``refused`` where the driver does not register memory."""
    spec = routing_spec(EXPERTS, TOP_K, range(LAYERS), LAYERS, BLOCK_TOKENS)
    found: dict[str, float | str] = {"device": torch.cuda.get_device_name() if device == "cuda" else device}
    with AuxBlocks(
        [spec], blocks=TOKENS, namespace=Namespace("probe", weights_version=0), memory="shared"
    ) as blocks:
        blocks.renew(range(TOKENS))
        try:
            found["registered_us"] = step_us(blocks, device, staged=False)
        except RegistrationError as refused:
            found["refused"] = str(refused)
        found["staged_us"] = step_us(blocks, device, staged=True)
    return found


if __name__ == "__main__":
    print(json.dumps(probe("cuda")))
