"""Folds on whatever device the words are, as :func:`kvroute.witness.folded` makes them of numpy's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import torch

from cache_manager.errors import ConfigError
from kvroute.witness import fold_keys

GATHER_NBYTES_MAX: Final = 32 << 20  # of KV that is copied at a time; about three times that is needed for a moment


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


def by_layer(names: Iterable[str]) -> dict[int, str]:
    """The names of layers by the number of the layer, which each has, in order.

    Raises :class:`ConfigError` where no name has one.
    """
    given, found = list(names), dict[int, str]()
    for name in given:
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        if len(numbers) == 1:
            found.setdefault(numbers[0], name)
    if not found:
        raise ConfigError("KV layers", "names with the number of their layer", sorted(given)[:3])
    return dict(sorted(found.items()))


__all__ = ["GATHER_NBYTES_MAX", "by_layer", "folded_on_device", "keys_on", "to_host"]
