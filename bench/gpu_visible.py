"""How long after a step's end its rows are visible in another process: measured by that process.

    python -m bench.gpu_visible REGION BLOCK STEPS

is the other process, which ``visible_us`` starts: it reads one block's first row until it is there, over and over.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch

from bench.gpu_passes import BLOCK_TOKENS, DEVICE, Model, Pass, keep_all
from cache_manager.regions import RegionView

STEPS, TOKENS, WAIT_S = 60, 256, 20.0


def watch(name: str, block: int, steps: int) -> None:
    """Print when (``time.monotonic_ns``) the first row of ``block`` became readable in generation 2, 3, ..."""
    with RegionView(name) as view:
        print("ready", flush=True)
        for generation in range(2, steps + 2):
            give_up_s = time.monotonic() + WAIT_S
            while not view.read("routing", [block], 0, 1, generations=[generation]).valid[0]:
                assert time.monotonic() < give_up_s, f"generation {generation} was never seen"
            print(time.monotonic_ns(), flush=True)


def visible_us(model: Model, engine: Any, capture: Any) -> tuple[float, float]:
    """Medians in microseconds: from the device being done, and from ``commit``'s return, to the other process's look.

    ``engine`` is an ``AuxBlocks`` whose blocks are in generation 1.
    """
    batch, slots = Pass(model, TOKENS), np.arange(TOKENS, dtype=np.int64) * BLOCK_TOKENS
    batch.slots.copy_(torch.from_numpy(slots))
    command = [sys.executable, "-m", "bench.gpu_visible", engine.region("device").name, "0", str(STEPS)]
    done: list[int] = []
    committed: list[int] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:  # noqa: S603 - this Python, this file
        assert other.stdout is not None
        try:
            assert other.stdout.readline() == "ready\n"
            seen = []
            for generation in range(2, STEPS + 2):
                engine.renew(range(TOKENS), np.full(TOKENS, generation))
                step = engine.begin_step(slots, in_place=True)
                keep_all(capture, batch)
                capture.commit(batch.slots)
                step.wrote("routing")
                torch.cuda.current_stream(DEVICE).synchronize()
                done.append(time.monotonic_ns())
                step.commit(capture.verdict(TOKENS).keep)
                committed.append(time.monotonic_ns())
                seen.append(int(other.stdout.readline()))
        finally:
            other.kill()
    after = np.array(seen)
    since_done, since_committed = (float(np.median(after - np.array(since))) / 1e3 for since in (done, committed))
    return since_done, since_committed


if __name__ == "__main__":
    watch(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
