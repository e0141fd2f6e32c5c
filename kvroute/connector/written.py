"""A step's ids become rows: of each engine the same way, with the label of their weights or for a reason not at all."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_manager.blocks import AuxBlocks
from cache_manager.spec import AuxBlockDataSpec
from kvroute.checks import unsound
from kvroute.connector.meter import NO_IDS, Meter
from kvroute.connector.mtp import NOTHING_BESIDE, RowsBeside
from kvroute.connector.settings import VERSION
from kvroute.connector.stages import STEP
from kvroute.routing import ROUTING_WEIGHTS


def write_ids(
    blocks: AuxBlocks,
    meter: Meter,
    spec: AuxBlockDataSpec,
    slots: NDArray[np.int64],
    ids: NDArray[Any] | str,
    version: int | None,
    redone: NDArray[np.bool_] | None = None,
    *,
    step: int | None = None,
    beside: RowsBeside = NOTHING_BESIDE,
    weights: NDArray[np.float32] | None = None,
) -> None:
    """Write the rows of a step's tokens at ``slots [n]``, negative: none. ``ids [n, layers, top_k]`` are any integers.

    Ids that no router can choose, and tokens that are ``redone [n]`` later, get no row: the ``meter`` counts them.
    ``ids`` may be the reason why the step has none. Rows have the label ``version``, or none if that is unknown, and
    the number of their ``step`` where they are a stage's part. Rows ``beside`` them are of other specs. ``weights`` are
    those of the ids, ``[n, layers, top_k]``: a token with one that is no finite number has neither. What the step has
    written over is never readable any more.
    """
    if isinstance(ids, str):
        meter.miss(ids, int(np.count_nonzero(slots >= 0)))
        blocks.write_step(slots, {})
        return
    wrong = unsound(ids, spec.attrs["num_experts"])  # before the cast, which would wrap
    if redone is not None:
        wrong = redone if wrong is None else wrong | redone
    if weights is not None:
        finite = np.isfinite(weights).all(axis=(1, 2))
        wrong = np.logical_not(finite) if wrong is None else wrong | ~finite
    if wrong is not None:
        meter.miss(NO_IDS, int(np.count_nonzero(wrong & (slots >= 0))))
    rows: dict[str, NDArray[Any]] = {spec.name: ids.astype(spec.dtype, copy=False)}
    if weights is not None:
        rows[ROUTING_WEIGHTS] = weights
    if version is not None:  # without one the rows have none, and old labels go
        rows[VERSION] = np.full(slots.size, version, np.uint32)
    if step is not None:
        rows[STEP] = np.full(slots.size, step, np.uint64)
    if not beside:
        blocks.write_step(slots, rows, None if wrong is None else ~wrong)
        return
    sound = np.ones(slots.size, np.bool_) if wrong is None else ~wrong
    keep = dict.fromkeys(rows, sound)
    for name, (values, count) in beside.items():
        rows[name] = values
        keep[name] = count & sound
    blocks.write_step(slots, rows, keep)


__all__ = ["write_ids"]
