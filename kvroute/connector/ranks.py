"""What each tensor-parallel rank has of the worker's end: the first one the rows, the others their folds of the KV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import distributed

from kvroute.connector.pages import Pages
from kvroute.connector.settings import Engine, StepMeta
from kvroute.connector.witness import KvFolder, witnessing
from kvroute.connector.worker import WorkerRows
from kvroute.witness import Run


def part_of(
    engine: Engine,
    kv_caches: Mapping[str, torch.Tensor],
    group: distributed.ProcessGroup,
    *,
    divided: bool,
    pages: Pages | None = None,
) -> WorkerRows | OtherRank | None:
    """What a tensor-parallel rank has: the first one the rows, since routers of all ranks choose the same.

    The others fold what they have of the KV: some heads, or, where ranks do not divide those, a copy of all. ``group``
    are all ranks, on the device of the KV.
    """
    rank, joined = distributed.get_rank(group), None
    if distributed.get_world_size(group) > 1:
        joined = partial(distributed.all_reduce if divided else agree, group=group)
    if not rank:
        return WorkerRows(engine, kv_caches, joined, pages=pages)
    if engine.witness == "off":
        return None
    layers = witnessing(kv_caches, engine.spec.attrs["layer_ids"])
    return OtherRank(KvFolder(layers, rank * layers[0].shape[1] if divided else 0, joined))


class OtherRank:
    """Of a rank that has no rows: its part of every fold, when the first rank asks for it."""

    def __init__(self, folder: KvFolder) -> None:
        self._folder = folder
        self._step: StepMeta | None = None

    def begin(self, step: StepMeta) -> None:
        """As :meth:`WorkerRows.begin`."""
        self._step = step
        self._fold(step.landed)

    def end(self) -> None:
        """As :meth:`WorkerRows.end`."""
        step, self._step = self._step, None
        if step is not None:
            self._fold(step.loads)
            self._fold(step.full)

    def _fold(self, runs: Sequence[Run]) -> None:
        self._folder.folds([block for run in runs for block in run.blocks])


def agree(folds: torch.Tensor, group: distributed.ProcessGroup) -> None:
    """Leave the folds that all ranks have; where they differ, one that stands for no KV."""
    least = folds.clone()
    distributed.all_reduce(least, distributed.ReduceOp.MIN, group)
    distributed.all_reduce(folds, distributed.ReduceOp.MAX, group)
    folds[least != folds] ^= 1


__all__ = ["OtherRank", "agree", "part_of"]
