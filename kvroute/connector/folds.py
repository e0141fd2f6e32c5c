"""Folds on whatever device the words are, as :func:`kvroute.witness.folded` makes them of numpy's."""

from __future__ import annotations

import numpy as np
import torch

from kvroute.witness import fold_keys


def keys_on(device: torch.device, first: int, words: int) -> torch.Tensor:
    """The keys int64 ``[2, words]`` of the words number ``first`` and on."""
    return torch.from_numpy(fold_keys(first, words).view(np.int64)).to(device)


def folded_on_device(words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The folds int64 ``[n]`` of ``words`` int64 ``[n, words]``; waits for nothing."""
    mixed = words * keys[0]
    high = (mixed >> 32) & 0xFFFFFFFF  # the shift of torch is arithmetic
    return mixed.bitwise_xor_(high).mul_(keys[1]).sum(1)


def to_host(values: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, pinned where it comes from a device: there when that is done with what was launched."""
    return values.to("cpu", non_blocking=True, copy=True)


__all__ = ["folded_on_device", "keys_on", "to_host"]
