"""The worker's end: the rows, their life, and where a witness of the KV is taken and compared."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import distributed

import kvroute
from cache_manager.stored import AnyJob, RestoreJob
from kvroute.capture.step_ids import StepIds
from kvroute.checks import valid_rows
from kvroute.connector.behind import PENDING_MAX, Behind
from kvroute.connector.meter import Meter
from kvroute.connector.pages import Look, Pages
from kvroute.connector.settings import VERSION, Engine, Handshake, StepMeta, Told
from kvroute.connector.transfers import Transfers
from kvroute.connector.witness import Join, KvFolder, KvWitness, OtherRank, to_host, witnessing
from kvroute.witness import Run

logger = logging.getLogger(__name__)

RESTORE_S: Final = 30.0
"""How long a step waits at most for all rows of KV that it loads; those that have not come are missing then."""
NO_IDS: Final = "ids that no router can choose, or KV that could not be loaded"
NO_SLOTS: Final = "the engine did not say where a step's tokens are"
NO_CARRIER: Final = "KV that was loaded and whose rows nothing brings: no store, or a part of a block"
OTHER: Final = "rows of other KV than was loaded"
NO_ANSWER: Final = f"the store of rows has not answered within {RESTORE_S} s"
NOT_RESTORED: Final = {
    "absent_blocks_not_restored": "the store of rows does not have them",
    "corrupt_blocks_not_restored": "the store of rows has damaged ones",
    "failed_blocks_not_restored": "the store of rows has failed",
}
"""Why a restore brought nothing, by the counters of :attr:`RestoreJob.lost`."""


class _Come(NamedTuple):
    """KV that was loaded, as far as it says something about its rows."""

    runs: Sequence[Run]
    page: Look | None
    folds: torch.Tensor | None  # of all blocks


class WorkerRows:
    """Applies what the scheduler says, and writes a step's rows when it is over. Nothing here raises inside a step.

    ``kv_caches`` are the layers' KV by name, as :func:`witnessing` wants them; ``pages`` are among them where rows go
    into the KV. The routers call the hooks of :attr:`ids`. Each step is :meth:`begin`, its slots in :attr:`slots`
    (int64 ``[tokens]``, negative: padding; copied when they are set), and :meth:`end`; one that computes nothing has no
    slots. Blocks whose KV could not be loaded are named to :meth:`fail` before it. See :func:`part_of` for ``joined``.

    Both calls launch what they want of the device and wait for nothing. What is then to be done on the host is done at
    once on a CPU; if ``late``, as beside any other device, it is done behind the device, on a thread of its own.
    """

    def __init__(
        self,
        engine: Engine,
        kv_caches: Mapping[str, torch.Tensor],
        joined: Join | None = None,
        *,
        late: bool | None = None,
        pages: Pages | None = None,
    ) -> None:
        assert engine.pages == (pages is not None)
        self.engine, self.pages = engine, pages
        settings, self._device = engine.settings, next(iter(kv_caches.values())).device
        self.store = kvroute.open_store(settings.opens) if settings.store else None
        self.blocks = kvroute.AuxBlocks(
            engine.layout.specs,
            blocks=engine.spares.stop,
            namespace=engine.namespace,
            store=self.store,
            required=[engine.spec.name],
            memory="shared",
            strict=settings.strict,
        )
        self.witness: KvWitness | None = None
        if engine.witness != "off":
            folder = KvFolder(witnessing(kv_caches, engine.spec.attrs["layer_ids"]), join=joined)
            self.witness = KvWitness(self.blocks, folder, engine.blocks)
        self.meter = Meter(self._counters)
        self.transfers = Transfers(self.blocks, settings, self._miss, self.meter) if engine.transfer else None
        self.ids = StepIds(engine.spec, engine.max_tokens, self._device)
        self.missing: Counter[str] = Counter()  # tokens without rows, by reason
        self._failed_jobs = False  # of the store, some
        self._slots: torch.Tensor | None = None
        self._behind: Behind | None = None
        if self._device.type != "cpu" if late is None else late:
            self._behind = Behind("kvroute-behind", self._lose, PENDING_MAX)
        self._lost: Exception | None = None
        self._step: StepMeta | None = None
        self._failed: set[int] = set()  # blocks whose KV has not come, in the step at hand
        self._failed_untold: set[int] = set()
        kvroute.preload()

    @property
    def slots(self) -> torch.Tensor | None:
        """Where the tokens of the step at hand are; an engine may use its own memory of them again before the end.

        Outside of a step there are none: an engine that captures a graph says some.
        """
        return self._slots

    @slots.setter
    def slots(self, slots: torch.Tensor | None) -> None:
        self._slots = None if slots is None or self._step is None else slots.clone()

    def handshake(self, inner: Any = None) -> Handshake:
        """What the scheduler has to know before the first request."""
        region: Any = self.blocks.region("device")
        address = self.transfers.crossing.address if self.transfers else ""
        return Handshake(inner, region.name, self._behind is not None, address)

    # ---------------------------------------------------------------- a step, as it is launched

    def begin(self, step: StepMeta) -> None:
        """A step begins: what has become of blocks until now."""
        self._step, self._slots = step, None
        self.ids.begin()
        if self.pages:
            self.pages.seen.begin()
        if self.transfers:
            self.transfers.expect(step)
        if step.before or step.landed or step.fetches or step.withdrawn:
            self._then(partial(self._begun, step, self._look(step.landed)))

    def fail(self, blocks: set[int]) -> None:
        """The KV of these blocks could not be loaded. A connector says so once; the scheduler is told, too."""
        if blocks:
            self._failed |= blocks
            self._failed_untold |= blocks
            if self.transfers:
                self.transfers.crossing.borrower.give_up(blocks)

    def failures(self) -> set[int]:
        """The blocks of which the scheduler has not been told."""
        untold, self._failed_untold = self._failed_untold, set()
        return untold

    def arrived(self, requests: AbstractSet[str], failed: AbstractSet[str] = frozenset()) -> set[str]:
        """The KV of these ``requests`` has come, or has ``failed`` to: which go on now, of all that wait for rows."""
        return self.transfers.arrived(requests, failed) if self.transfers else set(requests)

    def told(self, inner: Any = None) -> Any:
        """What the scheduler has to know after a step, beside what the ``inner`` connector says."""
        return Told(inner, why) if self.transfers and (why := self.transfers.told()) else inner

    def end(self) -> None:
        """The step is over."""
        step, self._step = self._step, None
        failed, self._failed = self._failed, set()
        if step is None:
            return
        redone: list[int] = []
        if failed:  # what was computed from KV that had not come will be computed again
            redone = [block for table in step.joined if not failed.isdisjoint(table) for block in table]
        ids: torch.Tensor | str = NO_SLOTS
        if (slots := self._slots) is not None:
            ids = self.ids.take(slots.shape[0])
            if self.pages:
                keep = None
                if redone:
                    blocks = torch.tensor(redone).to(slots.device, non_blocking=True)
                    keep = ~torch.isin(slots.div(self.engine.tokens, rounding_mode="floor"), blocks)
                self.pages.put(slots, None if isinstance(ids, str) else ids, step.namespace, keep)
            if self._device.type != "cpu":  # else both are this step's own
                slots, ids = to_host(slots), ids if isinstance(ids, str) else to_host(ids)
        elif self.pages and step.tokens:
            self.pages.forget()
        come, full = self._look(step.loads, failed), None
        if self.witness and step.full:
            full = self.witness.look(step.full)
        self._then(partial(self._ended, step, come, failed, slots, ids, redone, full))

    def _look(self, runs: Sequence[Run], without: Collection[int] = ()) -> _Come | None:
        """Look at the KV of these blocks, which was loaded; blocks ``without`` got none."""
        if not runs:
            return None
        page = self.pages.look(runs, without) if self.pages else None
        return _Come(runs, page, self.witness.look(runs) if self.witness else None)

    def _then(self, call: Callable[[], None]) -> None:
        """Do this when the device has done what was launched until now: on a CPU at once."""
        if self._behind is None:
            call()
            return
        if self._lost is not None and self.engine.settings.strict:
            raise self._lost
        if self._device.type != "cpu":
            done = torch.Event(self._device, blocking=True)
            done.record()
            call = partial(_after, done, call)
        self._behind.put(call)

    def _lose(self, error: Exception) -> None:
        """A step's work on the host has failed: what is in its blocks is unknown."""
        self._lost = error
        self.blocks.forget()

    # ---------------------------------------------------------------- and on the host, behind the device

    def _begun(self, step: StepMeta, landed: _Come | None) -> None:
        self.blocks.apply(step.before)
        if self.transfers:
            self.transfers.begin(step)
        if landed:
            self._land()
            self._compare(landed, step.namespace)

    def _ended(
        self,
        step: StepMeta,
        come: _Come | None,
        failed: Collection[int],
        slots: torch.Tensor | None,
        ids: torch.Tensor | str,
        redone: Sequence[int],
        full: torch.Tensor | None,
    ) -> None:
        if come:
            self._land()
        if failed:
            self.blocks.forget(sorted(failed))
        if come:
            self._compare(come, step.namespace)  # before the step counts as over: who sees that believes what was there
        if slots is not None:
            self._write(slots, ids, step, redone)
        elif step.tokens:  # whatever it has written over, a draft's row say, must not stay
            self._miss(NO_SLOTS, step.tokens)
            self.blocks.forget()
        if self.transfers:
            self.transfers.lend(step)
        if self._behind is not None:
            self.blocks.renew([self.engine.clock], [step.number])
        if full is not None and self.witness:
            self.witness.name(step.full, full)
        if step.after:
            self.blocks.apply(step.after)
        if step.before or step.after:
            for job in self.blocks.poll():
                self._tell(job)

    def _write(self, at: torch.Tensor, given: torch.Tensor | str, step: StepMeta, redone: Sequence[int]) -> None:
        """The ids of the tokens ``at`` these slots, or why there are none; those of blocks ``redone`` are no rows."""
        slots = at.numpy()
        if isinstance(given, str):
            self._miss(given, int(np.count_nonzero(slots >= 0)))
            self.blocks.write_step(slots, {})
            return
        spec, ids = self.engine.spec, given.numpy()
        keep = valid_rows(spec, ids)
        if redone:
            keep &= ~np.isin(slots // self.engine.tokens, redone)
        kept = None
        if np.count_nonzero(keep) < keep.size and (bad := int(np.count_nonzero(~keep & (slots >= 0)))):
            self._miss(NO_IDS, bad)
            kept = keep
        written = {spec.name: ids.astype(spec.dtype, copy=False)}  # ids that do not fit are not kept
        if step.version is not None:  # else the rows have none, whatever was there before
            written[VERSION] = np.full(slots.size, step.version, np.uint32)
        self.blocks.write_step(slots, written, kept)

    def _land(self) -> None:
        """Wait for rows that are on their way from the store; not for what was given up before."""
        give_up_s = time.monotonic() + RESTORE_S
        for job in self.blocks.jobs:
            if not isinstance(job, RestoreJob) or job.cancelled:
                continue
            if job.wait(max(0.0, give_up_s - time.monotonic())):
                self._tell(job)
            else:
                job.cancel()
                self._miss(NO_ANSWER, len(job.blocks) * self.engine.tokens)

    def _compare(self, come: _Come, namespace: bytes) -> None:
        """KV has come, and so have the rows that the store or its pages have for it: those of other KV are missing."""
        if self.pages and come.page:
            ids, good, lost = self.pages.rows(come.page, namespace)
            sound = good & valid_rows(self.engine.spec, ids)
            lost[NO_IDS] = int(np.count_nonzero(good & ~sound))
            for reason, tokens in lost.items():
                self._miss(reason, tokens)
            self.blocks.write_step(come.page.slots, {self.engine.spec.name: ids}, sound)
        else:  # only the store's have come, of whole blocks
            size = self.engine.tokens if self.store else 0
            self._miss(NO_CARRIER, sum(max(0, run.tokens - size * len(run.blocks)) for run in come.runs))
        if self.witness and come.folds is not None:
            self._miss(OTHER, len(self.witness.refused(come.runs, come.folds)) * self.engine.tokens)

    # ---------------------------------------------------------------- what is counted, and the end

    def _tell(self, job: AnyJob) -> None:
        """Count what a job that has landed did not do, and what it took."""
        self.meter.took(job.name, time.monotonic() - job.begun_s)
        if job.failure is not None and not self._failed_jobs:
            self._failed_jobs = True
            logger.warning("the store of rows has failed, %s: %s; further times are counted", job.name, job.failure)
        for why, blocks in job.lost.items() if isinstance(job, RestoreJob) else ():
            self._miss(NOT_RESTORED[why], blocks * self.engine.tokens)

    def _miss(self, reason: str, tokens: int) -> None:
        if not tokens:
            return
        if reason not in self.missing:
            logger.warning("%d tokens have no rows: %s; further ones are counted", tokens, reason)
        self.missing[reason] += tokens
        self.meter.miss(reason, tokens)

    def _counters(self) -> dict[str, Any]:
        """The counters of each tier, as they stand."""
        node = self.transfers and self.transfers.crossing.node.counters
        return {"blocks": self.blocks.counters, "store": self.blocks.store_counters or {}, "transfer": node or {}}

    def settle(self) -> None:
        """Wait until all that was to be done on the host is done, or for :data:`RESTORE_S`."""
        if self._behind is not None:
            self._behind.settle(RESTORE_S)

    def close(self) -> None:
        if self._behind is not None and not self._behind.close(RESTORE_S):
            logger.warning("the device is not done with the last steps: their rows stay behind")
            return
        if self.transfers:
            self.transfers.crossing.close()
        give_up_s = time.monotonic() + RESTORE_S
        for job in self.blocks.jobs:
            job.wait(max(0.0, give_up_s - time.monotonic()))
        self.blocks.close()
        if self.store is not None:
            self.store.close()


def _after(done: torch.Event, call: Callable[[], None]) -> None:
    done.synchronize()
    call()


def part_of(
    engine: Engine,
    kv_caches: Mapping[str, torch.Tensor],
    group: distributed.ProcessGroup,
    *,
    divided: bool,
    pages: Pages | None = None,
) -> WorkerRows | OtherRank | None:
    """What a tensor-parallel rank has: the first one the rows, since routers of all ranks choose the same.

    Where ranks have ``divided`` the heads of the KV, the others fold theirs for the witness; else the first has all of
    it. ``group`` are all ranks, on the device of the KV.
    """
    rank, folds = distributed.get_rank(group), divided and distributed.get_world_size(group) > 1
    joined = partial(distributed.all_reduce, group=group) if folds else None
    if not rank:
        return WorkerRows(engine, kv_caches, joined, pages=pages)
    if engine.witness == "off" or joined is None:
        return None
    layers = witnessing(kv_caches, engine.spec.attrs["layer_ids"])
    return OtherRank(KvFolder(layers, rank * layers[0].shape[1], joined))


__all__ = ["WorkerRows", "part_of"]
