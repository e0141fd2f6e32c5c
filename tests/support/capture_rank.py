"""One of two ranks that route half of a step's tokens each: ``python capture_rank.py BACKEND RANK DIRECTORY``.

Both draw the same ids for all tokens, so that each knows what the step's rows are. Rank 0 owns the blocks. With nccl
each rank has a GPU; with gloo the launch is interpreted, by ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import gc
import os
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch import distributed

import kvroute
from cache_manager.regions import SharedRegion
from kvroute.capture.layers import LayerCapture
from kvroute.capture.ranks import keep_of_all

LAYERS, TOP_K, EXPERTS, BLOCK_TOKENS, STEPS = 3, 2, 8, 4, 4
TOKENS = (5, 3)  # of each rank
BAD = 6  # of step 2: a token of rank 1


def main(backend: str, rank: int, directory: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    distributed.init_process_group(
        backend,
        init_method=f"file://{directory / 'ranks'}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
        device_id=device if backend == "nccl" else None,
    )
    spec = kvroute.routing_spec(EXPERTS, TOP_K, range(LAYERS), LAYERS, BLOCK_TOKENS)
    namespace = kvroute.Namespace("m", weights_version=1)
    owner = None
    if rank == 0:
        owner = kvroute.AuxBlocks([spec], blocks=8, namespace=namespace, memory="shared")
        owner.renew(range(8))
        (directory / "region").write_text(owner.region("device").name)
    distributed.barrier()
    name = (directory / "region").read_text()
    region = owner.region("device") if owner is not None else SharedRegion.attach(name, writable=True)
    first = sum(TOKENS[:rank])
    mine = slice(first, first + TOKENS[rank])
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    with LayerCapture(region, max(TOKENS), device) as capture:
        for number in range(STEPS):
            slots = rng.permutation(8 * BLOCK_TOKENS)[: sum(TOKENS)]
            ids = torch.rand(LAYERS, sum(TOKENS), EXPERTS, generator=generator).argsort(-1)[..., :TOP_K].to(torch.int32)
            if number == 2:
                ids[1, BAD] = 4
            step = owner.begin_step(slots, in_place=True) if owner is not None else None
            distributed.barrier()  # in an engine the collectives of the forward pass are between these
            for layer in range(LAYERS):
                capture.hook(layer)(ids[layer, mine].to(device))
            capture.commit(torch.from_numpy(slots[mine]).to(device))
            if backend == "nccl":
                torch.cuda.synchronize()
            keep = keep_of_all(capture.verdict(TOKENS[rank]), TOKENS[rank], max(TOKENS))
            sound = np.ones(sum(TOKENS), np.bool_)
            sound[BAD] = number not in (2, 3)  # a verdict tells a bad row again at the next launch
            assert keep.tolist() == sound.tolist(), f"step {number}: {keep}"
            if owner is not None and step is not None:
                step.wrote("routing")
                step.commit(keep)
                blocks = np.unique(slots // BLOCK_TOKENS)
                rows = owner.read("routing", blocks)
                at = np.searchsorted(blocks, slots // BLOCK_TOKENS) * BLOCK_TOKENS + slots % BLOCK_TOKENS
                assert rows.valid[at].tolist() == sound.tolist()
                assert (rows.values[at][sound] == ids.transpose(0, 1).numpy()[sound]).all()
                owner.renew(range(8))
    distributed.barrier()
    if owner is not None:
        owner.close()
    else:
        gc.collect()  # the interpreter leaves what it was launched with in cycles
        region.close()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
