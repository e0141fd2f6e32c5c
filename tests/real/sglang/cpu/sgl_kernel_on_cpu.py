"""Functions of ``sgl_kernel`` for speculative decoding, by torch: a wheel for a CPU has them, and there is none.

Each writes what SGLang's kernel of this name writes, into the tensors that it is given.
"""

from __future__ import annotations

import ctypes
from typing import Any


def assign_extend_cache_locs_cpu(requests: Any, slots: Any, starts: Any, stops: Any, out: Any, _width: int) -> None:
    """The slots of each request's positions from its start on, one request after the other."""
    place = 0
    for request, start, stop in zip(requests.tolist(), starts.tolist(), stops.tolist(), strict=True):
        out[place : place + stop - start] = slots[request, start:stop]
        place += stop - start


def assign_req_to_token_pool_cpu(requests: Any, slots: Any, starts: Any, stops: Any, given: Any, _width: int) -> None:
    """The reverse: ``given`` slots become those of the requests' positions."""
    place = 0
    for request, start, stop in zip(requests.tolist(), starts.tolist(), stops.tolist(), strict=True):
        slots[request, start:stop] = given[place : place + stop - start]
        place += stop - start


def assign_draft_cache_locs_contiguous_cpu(
    requests: Any, slots: Any, lengths: Any, out: Any, width: int, topk: int, columns: int
) -> None:
    assign_extend_cache_locs_cpu(requests, slots, lengths, lengths + topk * columns, out, width)


def fill_accept_out_cache_loc_cpu(accepted: Any, slots: Any, out: Any) -> None:
    indices = accepted.flatten()
    taken = slots[indices[indices >= 0].long()]
    out[: len(taken)] = taken


def fill_bonus_tokens_cpu(tokens: Any, lengths: Any, bonus: Any, stride: int) -> None:
    for i, length in enumerate(lengths.tolist()):
        bonus[i] = tokens.flatten()[i * stride + length - 1]


def copy_all_layer_kv_cache_cpu(pointers: Any, strides: Any, targets: Any, sources: Any) -> None:
    for pointer, stride in zip(pointers.tolist(), strides.tolist(), strict=True):
        tokens = [ctypes.string_at(pointer + source * stride, stride) for source in sources.tolist()]
        for target, token in zip(targets.tolist(), tokens, strict=True):
            ctypes.memmove(pointer + target * stride, token, stride)


def reconstruct_indices_from_tree_mask(
    mask: Any, lengths: Any, positions: Any, index: Any, child: Any, sibling: Any, batch: int, width: int
) -> None:
    import torch

    seen = mask.view(batch, width, width).bool().tril(-1)  # [request, draft, its ancestors]
    positions.copy_((seen.sum(-1) + lengths[:, None]).flatten())
    index.copy_(torch.arange(batch * width).view(batch, width))
    for tree, first, beside in zip(seen.tolist(), child, sibling, strict=True):
        _linked([max((at for at in range(i) if row[at]), default=-1) for i, row in enumerate(tree)], first, beside)


def _linked(parents: list[int], child: Any, sibling: Any) -> None:
    """The first child of each draft, and its next sibling; -1: none."""
    for i, parent in enumerate(parents):
        later = range(i + 1, len(parents))
        child[i] = next((k for k in later if parents[k] == i), -1)
        sibling[i] = next((k for k in later if parents[k] == parent), -1) if parent >= 0 else -1


def build_tree_kernel_efficient_cpu(
    parents: Any,
    chosen: Any,
    lengths: Any,
    mask: Any,
    positions: Any,
    index: Any,
    child: Any,
    sibling: Any,
    topk: int,
    _depth: int,
    width: int,
    _mode: int,
) -> None:
    """The mask of each request is of its drafts alone: ``QLEN_ONLY``."""
    import torch

    masks = mask.view(len(lengths), width, width)
    for i, length in enumerate(lengths.tolist()):
        nodes, above = chosen[i].tolist(), [-1]
        for node in nodes:
            group = node // topk
            above.append(0 if group == 0 else 1 + nodes.index(int(parents[i][group])))
        _linked(above, child[i], sibling[i])
        index[i] = torch.arange(i * width, (i + 1) * width)
        masks[i] = False
        for draft in range(width):
            at, depth = draft, 0
            while True:
                masks[i, draft, at] = True
                if above[at] < 0:
                    break
                at, depth = above[at], depth + 1
            positions[i * width + draft] = length + depth


def verify_tree_greedy_cpu(
    *,
    predicts: Any,
    accept_index: Any,
    accept_token_num: Any,
    candidates: Any,
    retrive_index: Any,
    retrive_next_token: Any,
    retrive_next_sibling: Any,
    target_predict: Any,
) -> None:
    flat = target_predict.flatten()
    for i in range(len(candidates)):
        node, count = 0, 0
        while True:
            at = int(retrive_index[i, node])
            accept_index[i, count] = at
            predicts[at] = flat[at]
            draft = int(retrive_next_token[i, node]) if count + 1 < accept_index.shape[1] else -1
            while draft >= 0 and candidates[i, draft] != flat[at]:
                draft = int(retrive_next_sibling[i, draft])
            if draft < 0:
                break
            node, count = draft, count + 1
        accept_token_num[i] = count
