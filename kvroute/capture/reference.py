"""The specification of capture: every faster path writes these bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_SAME_BITS = {torch.uint16: torch.int16, torch.uint32: torch.int32}
"""torch cannot scatter these unsigned types; their signed twins have the same bytes."""


def capture_reference(
    topk_ids: Sequence[torch.Tensor],  # layers x [tokens, top_k]            int32 | int64
    slots: torch.Tensor,  # [tokens]                                         int64, negative = padding
    rows: torch.Tensor,  # [blocks * block_tokens, layers, top_k]            uint8 | uint16 | uint32 | int32
) -> None:
    """Write each token's ids to its slot of ``rows``, as ``rows``'s dtype; tokens at negative slots are skipped.

    Slots of one call differ from each other; ids fit the dtype. Rows of other slots are not touched.
    """
    keep = slots >= 0
    values = torch.stack([ids[keep] for ids in topk_ids], dim=1).to(rows.dtype)
    bits = _SAME_BITS.get(rows.dtype, rows.dtype)
    rows.view(bits)[slots[keep]] = values.view(bits)
