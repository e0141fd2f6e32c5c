"""The worker's end: the rows, their life, and where a witness of the KV is taken and compared."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed

import kvroute
from cache_manager.feed import Renew
from cache_manager.store_jobs import RestoreJob
from kvroute.capture.step_ids import StepIds
from kvroute.connector.pages import Pages, page_name, slots_of
from kvroute.connector.settings import Engine, StepMeta
from kvroute.connector.witness import Join, KvFolder, KvWitness, OtherRank, witnessing
from kvroute.witness import Run

logger = logging.getLogger(__name__)

RESTORE_S: Final = 30.0
"""How long a step waits at most for rows of KV that it loads; they are missing then."""


class WorkerRows:
    """Applies what the scheduler says, and writes a step's rows when it is over. Nothing here raises inside a step.

    ``kv_caches`` are the layers' KV by name, as :func:`witnessing` and :func:`page_name` want them. The routers call
    the hooks of :attr:`ids`. Each step is :meth:`begin`, its slots in :attr:`slots` (int64 ``[tokens]``, negative:
    padding), and :meth:`end`; one that computes nothing has no slots. Blocks whose KV could not be loaded are named to
    :meth:`fail` before it. See :func:`part_of` for ``joined``.
    """

    def __init__(self, engine: Engine, kv_caches: Mapping[str, torch.Tensor], joined: Join | None = None) -> None:
        self.engine = engine
        settings = engine.settings
        self.store = kvroute.open_store(settings.store) if settings.store else None
        self.blocks = kvroute.EngineBlocks(
            engine.layout.specs,
            blocks=engine.blocks,
            namespace=engine.namespace,
            store=self.store,
            memory="shared",
            strict=settings.strict,
        )
        self.witness: KvWitness | None = None
        if engine.witness != "off":
            folder = KvFolder(witnessing(kv_caches, engine.spec.attrs["layer_ids"]), join=joined)
            self.witness = KvWitness(self.blocks, folder, engine.blocks)
        self.pages = Pages(kv_caches[page_name(engine.spec)], engine.spec) if engine.pages else None
        self.ids = StepIds(engine.spec, engine.max_tokens, next(iter(kv_caches.values())).device)
        self.missing: Counter[str] = Counter()  # tokens without rows, by reason
        self.slots: torch.Tensor | None = None
        self._step: StepMeta | None = None
        self._failed: set[int] = set()  # blocks whose KV has not come, in the step at hand
        self._failed_untold: set[int] = set()
        kvroute.preload()

    @property
    def region(self) -> str:
        name: str = self.blocks.region("device").name  # type: ignore[attr-defined]
        return name

    def begin(self, step: StepMeta) -> None:
        """A step begins: what has become of blocks until now."""
        self._step, self.slots = step, None
        if step.before:
            done = self.blocks.apply(step.before)
            if self.pages:
                for given in (each for each in done if isinstance(each, Renew)):
                    self.pages.clear(np.frombuffer(given.blocks, "<i8").astype(np.int64))
        if step.landed:
            self._land()
            self._unpack(step.landed, [])
            self._compare(step.landed)

    def fail(self, blocks: set[int]) -> None:
        """The KV of these blocks could not be loaded. A connector says so once; the scheduler is told, too."""
        if blocks:
            self._failed |= blocks
            self._failed_untold |= blocks

    def failures(self) -> set[int]:
        """The blocks of which the scheduler has not been told."""
        untold, self._failed_untold = self._failed_untold, set()
        return untold

    def end(self) -> None:
        """The step is over."""
        step, self._step = self._step, None
        failed, self._failed = self._failed, set()
        if step is None:
            return
        now = step.loads
        touched: list[int] = []
        if failed:  # what was computed from KV that had not come will be computed again
            touched = [block for table in step.joined if not failed.isdisjoint(table) for block in table]
        if now:
            self._land()
        if failed:
            self.blocks.forget(sorted(failed))
        if now:
            self._unpack(now, sorted(failed))
        if self.slots is not None:
            self._write(self.slots.cpu().numpy(), touched)
        if now:
            self._compare(now)
        if step.full and self.witness:
            self.witness.name(step.full)
        if step.after:
            self.blocks.apply(step.after)
        if step.before or step.after:
            self.blocks.poll()

    def _write(self, slots: NDArray[np.int64], without: list[int]) -> None:
        spec, ids = self.engine.spec, self.ids.take(len(slots))
        if isinstance(ids, str):
            self._miss(ids, int(np.count_nonzero(slots >= 0)))
            if self.pages:
                self.pages.put(slots, None)
            return
        keep = kvroute.valid_rows(spec, ids)
        rows = ids.astype(spec.dtype, copy=False)  # those that do not fit are not kept
        if without:
            keep &= ~np.isin(slots // self.engine.tokens, without)
        kept = None
        if np.count_nonzero(keep) < keep.size and (bad := int(np.count_nonzero(~keep & (slots >= 0)))):
            self._miss("ids that no router can choose, or KV that could not be loaded", bad)
            kept = keep
        self.blocks.write_step(slots, {spec.name: rows}, kept)
        if self.pages:
            self.pages.put(slots, rows, kept)

    def _land(self) -> None:
        """Wait for rows that are on their way from the store."""
        for job in self.blocks.jobs:
            if isinstance(job, RestoreJob) and not job.wait(RESTORE_S):
                job.cancel()

    def _unpack(self, loaded: Sequence[Run], lost: Sequence[int]) -> None:
        """Rows that came in pages with the KV of these blocks; of those ``lost`` nothing came."""
        if self.pages is None:
            return
        slots = np.concatenate([slots_of(np.asarray(run.blocks), self.engine.tokens, run.tokens) for run in loaded])
        slots = slots[~np.isin(slots // self.engine.tokens, lost)]
        ids, good = self.pages.get(slots)
        good &= kvroute.valid_rows(self.engine.spec, ids)
        if absent := int(np.count_nonzero(~good)):
            self._miss("pages without a sound row beside KV that was loaded", absent)
        self.blocks.write_step(slots, {self.engine.spec.name: ids}, good)

    def _compare(self, loaded: Sequence[Run]) -> None:
        """The KV of these blocks is there, and so are the rows that the store has for them."""
        if self.witness and (refused := self.witness.refused(loaded)):
            self._miss("rows of other KV than was loaded", len(refused) * self.engine.tokens)

    def _miss(self, reason: str, tokens: int) -> None:
        if reason not in self.missing:
            logger.warning("%d tokens have no rows: %s; further ones are counted", tokens, reason)
        self.missing[reason] += tokens

    def close(self) -> None:
        for job in self.blocks.jobs:
            job.wait(RESTORE_S)
        self.blocks.close()
        if self.store is not None:
            self.store.close()


def part_of(
    engine: Engine, kv_caches: Mapping[str, torch.Tensor], group: distributed.ProcessGroup, *, divided: bool
) -> WorkerRows | OtherRank | None:
    """What a tensor-parallel rank has: the first one the rows, since routers of all ranks choose the same.

    The others fold what they have of the KV: some heads, or, where ranks do not divide those, a copy of all. ``group``
    are all ranks, on CPUs.
    """
    rank, joined = distributed.get_rank(group), None
    if distributed.get_world_size(group) > 1:
        joined = partial(distributed.all_reduce if divided else _agree, group=group)
    if not rank:
        return WorkerRows(engine, kv_caches, joined)
    if engine.witness == "off":
        return None
    layers = witnessing(kv_caches, engine.spec.attrs["layer_ids"])
    return OtherRank(KvFolder(layers, rank * layers[0].shape[1] if divided else 0, joined))


def _agree(folds: torch.Tensor, group: distributed.ProcessGroup) -> None:
    """Leave the folds that all ranks have; where they differ, one that stands for no KV."""
    least = folds.clone()
    distributed.all_reduce(least, distributed.ReduceOp.MIN, group)
    distributed.all_reduce(folds, distributed.ReduceOp.MAX, group)
    folds[least != folds] ^= 1


__all__ = ["WorkerRows", "part_of"]
