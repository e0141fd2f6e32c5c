"""The worker's end: the rows, their life, and where a witness of the KV is taken and compared."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

import kvroute
from cache_manager.feed import Renew
from cache_manager.store_jobs import RestoreJob
from kvroute.capture.step_ids import StepIds
from kvroute.integrations.vllm.config import Engine
from kvroute.integrations.vllm.pages import Pages, page_name, slots_of
from kvroute.integrations.vllm.scheduler import StepMeta
from kvroute.integrations.vllm.witness import KvFolder, KvWitness, witnessing
from kvroute.witness import Run

logger = logging.getLogger(__name__)

RESTORE_S: Final = 30.0
"""How long a step waits at most for rows of KV that it loads; they are missing then."""


class WorkerRows:
    """Applies what the scheduler says, and writes a step's rows when it is over. Nothing here raises inside a step."""

    def __init__(self, engine: Engine, kv_caches: Mapping[str, torch.Tensor]) -> None:
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
            folder = KvFolder(witnessing(kv_caches, engine.spec.attrs["layer_ids"]))
            self.witness = KvWitness(self.blocks, folder, engine.blocks)
        self.pages = Pages(kv_caches[page_name(engine.spec)], engine.spec) if engine.pages else None
        self.ids = StepIds(engine.spec, engine.max_tokens, next(iter(kv_caches.values())).device)
        self.missing: Counter[str] = Counter()  # tokens without rows, by reason
        self.slots: torch.Tensor | None = None
        self._step: StepMeta | None = None
        self._later: dict[str, Run] = {}
        kvroute.preload()

    @property
    def region(self) -> str:
        name: str = self.blocks.region("device").name  # type: ignore[attr-defined]
        return name

    def begin(self, step: StepMeta) -> None:
        """A step begins: what has become of blocks until now."""
        self._step, self.slots = step, None
        done = self.blocks.apply(step.before)
        if self.pages:
            for given in (each for each in done if isinstance(each, Renew)):
                self.pages.clear(np.frombuffer(given.blocks, "<i8").astype(np.int64))
        self._later |= {name: step.loads[name] for name in step.asynchronous}

    def end(self, failed: set[int]) -> None:
        """The step is over; the KV of the blocks ``failed`` could not be loaded."""
        step, self._step = self._step, None
        if step is None:
            return
        now = [run for name, run in step.loads.items() if name not in step.asynchronous]
        if now:
            self._land()
        if failed:
            self.blocks.forget(sorted(failed))
        self._unpack(now, sorted(failed))
        if self.slots is not None:
            touched = [block for table in step.admitted if not failed.isdisjoint(table) for block in table]
            self._write(self.slots.cpu().numpy(), touched)
        self._compare(now)
        if self.witness:
            self.witness.name(step.full)
        self.blocks.apply(step.after)
        self.blocks.poll()

    def loaded(self, request: str) -> None:
        """KV that was to come later has come."""
        if run := self._later.pop(request, None):
            self._land()
            self._unpack([run], [])
            self._compare([run])

    def _write(self, slots: NDArray[np.int64], without: list[int]) -> None:
        ids = self.ids.take(len(slots))
        if isinstance(ids, str):
            self._miss(ids, int(np.count_nonzero(slots >= 0)))
            if self.pages:
                self.pages.put(slots, None)
            return
        keep = kvroute.valid_rows(self.engine.spec, ids)
        if without:  # what these computed, they computed from KV that had not come; they will again
            keep &= ~np.isin(slots // self.engine.tokens, without)
        bad = int(np.count_nonzero(~keep & (slots >= 0)))
        if bad:
            self._miss("ids that no router can choose, or KV that could not be loaded", bad)
        self.blocks.write_step(slots, {self.engine.spec.name: ids}, keep if bad else None)
        if self.pages:
            self.pages.put(slots, ids, keep)

    def _land(self) -> None:
        """Wait for rows that are on their way from the store."""
        for job in self.blocks.jobs:
            if isinstance(job, RestoreJob) and not job.wait(RESTORE_S):
                job.cancel()

    def _unpack(self, loaded: Sequence[Run], lost: Sequence[int]) -> None:
        """Rows that came in pages with the KV of these blocks; of those ``lost`` nothing came."""
        if self.pages is None or not loaded:
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


__all__ = ["WorkerRows"]
