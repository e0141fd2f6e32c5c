"""Verdicts of several ranks that captured parts of one step: one process commits them all."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed

from kvroute.capture.layers import Verdict


def keep_of_all(
    verdict: Verdict, tokens: int, tokens_max: int, group: distributed.ProcessGroup | None = None
) -> NDArray[np.bool_]:
    """Which rows of all ranks' tokens are sound, ``bool [sum of tokens]``, in the order of the ranks; on every rank.

    ``verdict`` is this rank's, of ``tokens`` tokens; ``tokens_max``, equal on all ranks, is the most that one has. One
    gather of ``tokens_max + 8`` bytes a rank, on a group of gloo, or of NCCL through the current device. When it
    returns every rank's rows are in the region.
    """
    assert tokens <= tokens_max, "tokens_max is the most that a rank has"
    mine = np.zeros(tokens_max + 8, np.uint8)
    mine[:8] = np.array([tokens], "<i8").view(np.uint8)
    mine[8 : 8 + tokens] = True if verdict.keep is None else verdict.keep
    device = "cuda" if distributed.get_backend(group) == "nccl" else "cpu"
    sent = torch.from_numpy(mine).to(device)
    found = [torch.empty_like(sent) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(found, sent, group=group)
    parts = [each.cpu().numpy() for each in found]
    return np.concatenate([part[8 : 8 + int(part[:8].view("<i8")[0])] for part in parts]).astype(np.bool_)


__all__ = ["keep_of_all"]
