"""Speculative decoding: which tokens of a pass that verifies drafts were accepted, and where their KV is then.

Such a pass computes the same number of tokens for each request: the last token that was sampled, and drafts behind it,
which may form a tree. Those on the accepted path are at the request's next positions, and SGLang moves their KV to the
front of the request's slots. The others were never read: they have no position, and no row.
"""

from __future__ import annotations

import torch


def accepted(slots: torch.Tensor, index: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots of accepted tokens, and which tokens of the pass they are.

    The pass has the ``slots [requests * width]``; ``index [requests, depth]`` are the accepted tokens of each request
    among all of the pass, of which the first ``lengths [requests]`` count. Both results are ``[requests * depth]``:
    slots are -1, and tokens 0, where nothing was accepted, so that no size depends on what a device says.

    >>> slots, tokens = accepted(torch.arange(32, 40), torch.tensor([[0, 2, -1], [4, -1, -1]]), torch.tensor([2, 1]))
    >>> slots.tolist(), tokens.tolist()
    ([32, 33, -1, 36, -1, -1], [0, 2, 0, 4, 0, 0])
    """
    requests, depth = index.shape
    windows = slots.view(requests, -1)
    if windows.shape[1] < depth:
        raise AssertionError(f"{depth} accepted tokens of {windows.shape[1]} that a pass has for each request")
    counts = torch.arange(depth, device=index.device)[None, :] < lengths[:, None]
    places = torch.where(counts, windows[:, :depth], -1)
    tokens = torch.where(counts, index.long(), 0)
    return places.flatten(), tokens.flatten()


__all__ = ["accepted"]
