"""What was due of a router, and what a watch says of it in a receipt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvroute.replay.receipts import Gap, Use

NO_SAMPLE: Final = -1
"""The number of a token that is of no sample."""


@dataclass(slots=True, eq=False)
class DueRows:
    """The rows of one micro-batch that are due in one layer, and what was seen of them."""

    ids: torch.Tensor  # [tokens, top_k], 0 where nothing is due
    there: torch.Tensor  # [tokens]  bool
    samples: NDArray[np.int64]  # [tokens]  -1 = unknown or padding
    by_hand: bool
    passes: int = 0
    recomputations: int = 0
    taken: torch.Tensor | None = None  # [tokens]  bool
    repeated: torch.Tensor | None = None  # [tokens]  bool
    ahead: torch.Tensor | None = None  # [tokens]  bool: of multi-token prediction's router of this number
    other_tokens: int | None = None
    """How many tokens a pass had that was not of as many as there are rows."""


UseFlags = tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]


def fetched_flags(dues: Sequence[DueRows]) -> dict[DueRows, UseFlags]:
    """What is due, was taken and was repeated, bool ``[tokens]`` each; fetched from a device at once."""
    there_parts = [due.there for due in dues]
    taken = [_or_none(due.taken, due.there) for due in dues]
    repeated = [_or_none(due.repeated, due.there) for due in dues]
    lengths = [len(due.samples) for due in dues]
    ends = np.cumsum(lengths)[:-1]
    columns = [np.split(on_host(parts), ends) for parts in (there_parts, taken, repeated)]
    fetched: dict[DueRows, UseFlags] = {}
    for due, there, used, again in zip(dues, *columns, strict=True):
        fetched[due] = there, used & there, again & there
    return fetched


def _or_none(flags: torch.Tensor | None, there: torch.Tensor) -> torch.Tensor:
    """``flags``, or no token ``[tokens]``, as many as ``there`` has."""
    return torch.zeros_like(there) if flags is None else flags


def on_host(parts: Sequence[torch.Tensor]) -> NDArray[np.bool_]:
    """``parts`` end to end. Those of one device are fetched together."""
    if len({part.device for part in parts}) > 1:
        parts = [part.cpu() for part in parts]
    flags: NDArray[np.bool_] = torch.cat(list(parts)).cpu().numpy()
    return flags


def router_use(
    micro_batch: int,
    layer: int,
    due: DueRows,
    flags: UseFlags,
    most: int,
) -> tuple[Use, list[Gap]]:
    """One router's use of a micro-batch, of which another router had ``most`` forward passes, and its gaps."""
    numbers, columns = np.unique(due.samples, return_inverse=True)
    counts_of = [np.bincount(columns, flag, len(numbers)) for flag in flags]
    there, taken, repeated = (tuple(counts.astype(np.int64).tolist()) for counts in counts_of)
    samples = tuple(None if number == NO_SAMPLE else number for number in numbers.tolist())
    use = Use(micro_batch, layer, samples, there, taken, repeated, due.passes, due.recomputations)
    gaps: list[Gap] = []
    if due.other_tokens is not None:
        wanted = f"passes of {len(due.samples)} local tokens, as rows are due"
        got = str(due.other_tokens)
        return use, [Gap(layer, micro_batch, None, wanted, got)]
    passes = max(most, 1)
    if due.passes < passes and any(there):
        wanted = "a forward pass"
        if due.passes:
            wanted = f"{passes} forward passes, as other routers had"
        gaps.append(Gap(layer, micro_batch, None, wanted, str(due.passes or "none")))
    lacks = [(taken, flags[1], "")] if due.passes else []
    if due.recomputations:
        lacks.append((repeated, flags[2], " when computed again"))
    for counts, flag, when in lacks:
        missed = flags[0] & ~flag
        for column, sample in enumerate(samples):
            due_count = there[column]
            count = counts[column]
            if count < due_count:
                wanted = f"{due_count} tokens sent to the experts of their rows{when}"
                of_sample = missed & (columns == column)
                got = f"{count}, not local token {int(of_sample.argmax())}"
                gaps.append(Gap(layer, micro_batch, sample, wanted, got))
    return use, gaps


__all__ = ["NO_SAMPLE", "DueRows", "fetched_flags", "on_host", "router_use"]
