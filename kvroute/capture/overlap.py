"""Whether layers' values lie in memory of their own: a router that uses a buffer again has overwritten a layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray


def overlapping(tensors: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """Two of ``tensors`` ``[..., top_k]`` that have bytes in common, by index; layers side by side have none."""
    before: list[tuple[int, int]] = []  # where the last byte of one lies, and which it is
    for address, i in sorted((t.data_ptr(), i) for i, t in enumerate(tensors) if t.numel()):
        before = [(end, j) for end, j in before if end > address]
        for _, j in before:
            if not _interleaved(tensors[j], tensors[i]):
                return min(i, j), max(i, j)
        before.append((address + _extent(tensors[i]), i))
    return None


def _interleaved(low: torch.Tensor, high: torch.Tensor) -> bool:
    """Whether two layers of one ``[tokens, layers, top_k]`` lie between each other without touching."""
    if low.stride() != high.stride() or low.stride(-1) != 1 or low.element_size() != high.element_size():
        return False
    between, uneven = divmod(high.data_ptr() - low.data_ptr(), low.element_size())
    step, top_k = math.gcd(*low.stride()[:-1]), low.shape[-1]
    return not uneven and step > 0 and top_k <= between % step <= step - top_k


def extents(
    strides: NDArray[np.int64],  # [n, 2]: elements from token to token, from value to value; none is negative
    widths: NDArray[np.int64],  # [n]: values of a token
    sizes: NDArray[np.int64],  # [n]: bytes of a value
    tokens: int,
) -> NDArray[np.int64]:  # [n]
    """Bytes from each one's first value to behind the last of ``tokens`` tokens."""
    reach: NDArray[np.int64] = max(tokens - 1, 0) * strides[:, 0] + (widths - 1) * strides[:, 1] + 1
    return reach * sizes * (tokens > 0)


def lie_apart(addresses: NDArray[np.int64], extents: NDArray[np.int64]) -> bool:
    """Whether each of ``[n]`` lies behind the other, as an allocator lays them; ``False`` needs a closer look."""
    order = addresses.argsort()
    return bool(((addresses + extents)[order[:-1]] <= addresses[order[1:]]).all())


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first value to behind the last."""
    if tensor.is_contiguous():
        return tensor.numel() * tensor.element_size()
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()


__all__ = ["extents", "lie_apart", "overlapping"]
