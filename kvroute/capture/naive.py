"""The specification of the capture launch: the same signature as ``kernel.capture_rows``, a plain loop in torch.

The kernel writes the same values and makes the same counts, byte by byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from kvroute.capture.plan import LAYERS_MAX, Check, Plan


def capture_rows(
    sources: Sequence[Sequence[torch.Tensor | None]],  # specs x layers x [>= tokens, top_k]; None: not recorded
    slots: torch.Tensor,  # [tokens] int64; negative: padding
    rows: torch.Tensor,  # [blocks, record_nbytes] uint8: of the tier
    plan: Plan,
    slots_end: int,  # blocks * block_tokens of the device tier's region
    checks: torch.Tensor,  # [7] int32: see Check
    bad: torch.Tensor,  # [>= tokens] int32: set to 1 if a row of the token is bad
) -> None:
    """Store each token's values at its slot, narrowed to the rows' dtype, and count the bad ones.

    A row of a layer that was not recorded keeps its bytes; a bad id is stored as its low bits. Padding is neither
    stored nor checked, a slot outside the buffer is counted and not stored.
    """
    out = rows.numpy()
    if len(slots):
        checks[Check.TOKENS] = len(slots)
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        if slot >= slots_end:
            _count(checks, bad, token, len(plan.specs), 0, 0, {Check.SLOT: 1})
            continue
        block, offset = divmod(slot, plan.block_tokens)
        for s, spec in enumerate(plan.specs):
            at = spec.offset + offset * spec.row_nbytes
            row = out[block, at : at + spec.row_nbytes].view(spec.dtype).reshape(spec.layers, spec.top_k)
            for layer, source in enumerate(sources[s]):
                if source is None:
                    _count(checks, bad, token, len(plan.specs), s, layer, {Check.MISSING: 1})
                    continue
                values = source[token].reshape(-1).tolist()
                found: dict[Check, int] = {}
                if spec.experts:
                    found[Check.RANGE] = sum(not 0 <= v < spec.experts for v in values)
                    found[Check.DUPLICATE] = sum(v in values[k + 1 :] for k, v in enumerate(values))
                    found[Check.ZERO] = int(spec.top_k > 1 and not any(values))
                row[layer] = np.array(values, np.float32 if spec.dtype == "float32" else np.int64).astype(spec.dtype)
                _count(checks, bad, token, len(plan.specs), s, layer, found)


def _count(
    checks: torch.Tensor,
    bad: torch.Tensor,
    token: int,
    specs: int,
    spec: int,
    layer: int,
    found: Mapping[Check, int],
) -> None:
    if not any(found.values()):
        return
    for check, n in found.items():
        checks[check] += n
    bad[token] = 1
    number = (token * specs + spec) * LAYERS_MAX + layer
    checks[Check.FIRST] = min(int(checks[Check.FIRST]), number)


__all__ = ["capture_rows"]
