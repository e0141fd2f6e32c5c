"""The worker's end: the rows, their life, and the KV's witnesses, which it takes and compares."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import distributed

import kvroute
from cache_manager.jobs import AnyJob, RestoreJob
from kvroute.capture.step_ids import StepIds
from kvroute.checks import unsound, valid_rows
from kvroute.connector.behind import PENDING_MAX, Behind
from kvroute.connector.meter import Meter
from kvroute.connector.pages import Look, Pages
from kvroute.connector.settings import VERSION, Engine, Handshake, StepMeta, Told
from kvroute.connector.transfers import Transfers
from kvroute.connector.witness import Join, KvFolder, KvWitness, OtherRank, to_host, witnessing
from kvroute.witness import Run

logger = logging.getLogger(__name__)

RESTORE_S: Final = 30.0
"""How long a step waits at most for the rows of KV that it loads; rows that have not come by then are missing."""
NO_IDS: Final = "ids that no router can choose, or KV that could not be loaded"
NO_SLOTS: Final = "the engine did not say where a step's tokens are"
NO_CARRIER: Final = "nothing brings the rows of KV that was loaded: no store, or a part of a block"
OTHER: Final = "rows of other KV than was loaded"
NO_ANSWER: Final = f"the store of rows has not answered within {RESTORE_S} s"
NOT_RESTORED: Final = {
    "absent_blocks_not_restored": "the store of rows does not have them",
    "corrupt_blocks_not_restored": "the store of rows has damaged ones",
    "failed_blocks_not_restored": "the store of rows has failed",
}
"""Why a restore brought nothing, by the counters of :attr:`RestoreJob.not_restored`."""


class _Come(NamedTuple):
    """KV that was loaded, with its pages and folds, if any."""

    runs: Sequence[Run]
    page: Look | None
    folds: torch.Tensor | None  # of all blocks


class WorkerRows:
    """Applies what the scheduler says, and writes a step's rows when it is over. Nothing here raises inside a step.

    ``kv_caches`` are the layers' KV by name, as :func:`witnessing` needs them; ``pages`` are among them if rows go into
    the KV. The routers call the hooks of :attr:`ids`. Each step is :meth:`begin`, its slots in :attr:`slots` (int64
    ``[tokens]``, negative: padding), and :meth:`end`; a step that computes nothing has no slots. Blocks whose KV could
    not be loaded are given to :meth:`fail` before it. See :func:`part_of` for ``joined``.

    Both calls launch work on the device and wait for nothing. On a CPU the host's part is done at once; if ``late``,
    the default beside any other device, a thread of its own does it behind the device.
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
        self._on_cpu = self._device.type == "cpu"  # asked for once: it takes as long as a small array
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
        self.missing = self.meter.missing  # numbers of tokens without rows, by cause
        self.transfers = Transfers(self.blocks, settings, self.meter) if engine.transfer else None
        self._experts: int = engine.spec.attrs["num_experts"]
        self.ids = StepIds(engine.spec, engine.max_tokens, self._device)
        self._failed_jobs = False  # whether a job of the store has failed
        self._slots: torch.Tensor | None = None
        self._behind: Behind | None = None
        if not self._on_cpu if late is None else late:
            self._behind = Behind("kvroute-behind", self._lose, PENDING_MAX)
        self._slots_stay = self._behind is None and not engine.drafts  # until the step's end, their last reader's
        self._lost: BaseException | None = None
        self._step: StepMeta | None = None
        self._begun = False  # on the host
        self._failed: set[int] = set()  # blocks whose KV has not come, in the step at hand
        self._failed_untold: set[int] = set()
        kvroute.preload()

    @property
    def slots(self) -> torch.Tensor | None:
        """Where the current step's tokens are. An engine with drafts may reuse its own memory of them before the end.

        Outside a step they are ignored: an engine that captures a graph sets some.
        """
        return self._slots

    @slots.setter
    def slots(self, slots: torch.Tensor | None) -> None:
        if slots is None or self._step is None:
            self._slots = None
        else:
            self._slots = slots if self._slots_stay else slots.clone()

    def handshake(self, inner: Any = None) -> Handshake:
        """The message for the scheduler before the first request."""
        region: Any = self.blocks.region("device")
        address = self.transfers.crossing.address if self.transfers else ""
        return Handshake(inner, region.name, self._behind is not None, address)

    # ---------------------------------------------------------------- a step, as it is launched

    def begin(self, step: StepMeta) -> None:
        """A step begins: what has become of blocks until now. Unless that hurries, the host hears of it at the end."""
        if self._step is not None and not self._begun:  # its end never came
            self._then(self._begin_on_host, self._step, None)
        self._step, self._slots = step, None
        self.ids.begin()
        if self.pages:
            self.pages.seen.begin()
        if self.transfers:
            self.transfers.expect(step)
        if begun := bool(step.joined or step.landed or step.fetches or step.withdrawn):
            self._then(self._begin_on_host, step, self._look(step.landed))
        self._begun = begun

    def fail(self, blocks: set[int]) -> None:
        """The KV of these blocks could not be loaded; a connector says so once. :meth:`failures` tells the
        scheduler."""
        if blocks:
            self._failed |= blocks
            self._failed_untold |= blocks
            if self.transfers:
                self.transfers.crossing.borrower.give_up(blocks)

    def failures(self) -> set[int]:
        """The failed blocks that the scheduler has not been told of."""
        untold, self._failed_untold = self._failed_untold, set()
        return untold

    def arrived(self, requests: AbstractSet[str], failed: AbstractSet[str] = frozenset()) -> set[str]:
        """The KV of these ``requests`` has come, or has ``failed`` to: which of all that wait for rows go on now."""
        return self.transfers.arrived(requests, failed) if self.transfers else set(requests)

    def told(self, inner: Any = None) -> Any:
        """The message for the scheduler after a step, beside the ``inner`` connector's."""
        return Told(inner, why) if self.transfers and (why := self.transfers.told()) else inner

    def end(self) -> None:
        """The step is over."""
        step, self._step = self._step, None
        failed, self._failed = self._failed, set()
        if step is None:
            return
        redone: list[int] = []
        if failed:  # tokens computed from KV that had not come will be computed again
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
            if not self._on_cpu:  # else both are this step's own
                slots, ids = to_host(slots), ids if isinstance(ids, str) else to_host(ids)
        elif self.pages and step.tokens:
            self.pages.forget()
        come, full = self._look(step.loads, failed), None
        if self.witness and step.full:
            full = self.witness.look(step.full)
        begun, self._begun = self._begun, True
        self._then(self._end_on_host, step, begun, come, failed, slots, ids, redone, full)

    def _look(self, runs: Sequence[Run], without: Collection[int] = ()) -> _Come | None:
        """Look at the loaded KV of these blocks; blocks ``without`` got none."""
        if not runs:
            return None
        page = self.pages.look(runs, without) if self.pages else None
        return _Come(runs, page, self.witness.look(runs) if self.witness else None)

    def _then(self, does: Callable[..., None], *given: Any) -> None:
        """Do this when the device has done the work launched until now: on a CPU at once."""
        if self._behind is None:
            does(*given)
            return
        call = partial(does, *given)
        if self._lost is not None and self.engine.settings.strict:
            raise self._lost
        if not self._on_cpu:
            done = torch.cuda.Event(blocking=True) if self._device.type == "cuda" else torch.Event(self._device)
            done.record()  # on CUDA the thread behind sleeps; torch.Event ignores ``blocking``, and spins
            call = partial(_after, done, call)
        self._behind.put(call)

    def _lose(self, error: BaseException) -> None:
        """A step's work on the host has failed: the state of its blocks is unknown, so forget all rows."""
        self._lost = error
        self.blocks.forget()

    # ---------------------------------------------------------------- and on the host, behind the device

    def _begin_on_host(self, step: StepMeta, landed: _Come | None) -> None:
        if step.before:
            self.blocks.apply(step.before)
        if self.transfers:
            self.transfers.begin(step)
        if landed:
            self._land()
            self._compare(landed, step.namespace)

    def _end_on_host(
        self,
        step: StepMeta,
        begun: bool,
        come: _Come | None,
        failed: Collection[int],
        slots: torch.Tensor | None,
        ids: torch.Tensor | str,
        redone: Sequence[int],
        full: torch.Tensor | None,
    ) -> None:
        try:
            if not begun and step.before:
                self._begin_on_host(step, None)
            if come:
                self._land()
            if failed:
                self.blocks.forget(sorted(failed))
            if come:
                self._compare(come, step.namespace)  # before the step counts as over: then its rows are trusted
            if slots is not None:
                self._write(slots, ids, step, redone)
            elif step.tokens:  # rows that it overwrote, for example a draft's, must not stay
                self.meter.miss(NO_SLOTS, step.tokens)
                self.blocks.forget()
            if self.transfers:
                self.transfers.lend(step)
        except BaseException:
            self.blocks.forget()  # before the step counts as over, so that its rows are missing
            raise
        finally:
            if self._behind is not None:
                self.blocks.renew([self.engine.clock], [step.number])
        if full is not None and self.witness:
            self.witness.name(step.full, full)
        if step.after:
            self.blocks.apply(step.after)
        if step.before or step.after:
            for job in self.blocks.jobs.poll():
                self._tell(job)

    def _write(self, at: torch.Tensor, given: torch.Tensor | str, step: StepMeta, redone: Sequence[int]) -> None:
        """Write the ids of the tokens ``at`` these slots, if they were ``given``; blocks ``redone`` get no rows."""
        slots = at.numpy()
        if isinstance(given, str):
            self.meter.miss(given, int(np.count_nonzero(slots >= 0)))
            self.blocks.write_step(slots, {})
            return
        spec, ids = self.engine.spec, given.numpy()
        wrong = unsound(ids, self._experts)
        if redone:
            again = np.isin(slots // self.engine.tokens, redone)
            wrong = again if wrong is None else wrong | again
        if wrong is not None:
            self.meter.miss(NO_IDS, int(np.count_nonzero(wrong & (slots >= 0))))
        written = {spec.name: ids.astype(spec.dtype, copy=False)}  # ids that do not fit are not written
        if step.version is not None:  # without one the rows have none, and old labels go
            written[VERSION] = np.full(slots.size, step.version, np.uint32)
        self.blocks.write_step(slots, written, None if wrong is None else ~wrong)

    def _land(self) -> None:
        """Wait for rows that are on their way from the store, but not for cancelled jobs."""
        give_up_s = time.monotonic() + RESTORE_S
        for job in self.blocks.jobs:
            if not isinstance(job, RestoreJob) or job.cancelled:
                continue
            if job.wait(max(0.0, give_up_s - time.monotonic())):
                self._tell(job)
            else:
                job.cancel()
                self.meter.miss(NO_ANSWER, len(job.blocks) * self.engine.tokens)

    def _compare(self, come: _Come, namespace: bytes) -> None:
        """KV has come with its rows, from the store or in pages: make rows of other KV missing."""
        if self.pages and come.page:
            ids, good, lost = self.pages.rows(come.page, namespace)
            sound = good & valid_rows(self.engine.spec, ids)
            lost[NO_IDS] = int(np.count_nonzero(good & ~sound))
            for reason, tokens in lost.items():
                self.meter.miss(reason, tokens)
            self.blocks.write_step(come.page.slots, {self.engine.spec.name: ids}, sound)
        else:  # only the store brings rows, for whole blocks
            size = self.engine.tokens if self.store else 0
            self.meter.miss(NO_CARRIER, sum(max(0, run.tokens - size * len(run.blocks)) for run in come.runs))
        if self.witness and come.folds is not None:
            self.meter.miss(OTHER, len(self.witness.refused(come.runs, come.folds)) * self.engine.tokens)

    # ---------------------------------------------------------------- what is counted, and the end

    def _tell(self, job: AnyJob) -> None:
        """Count the time of a landed job, and the blocks that it did not bring."""
        self.meter.took(job.name, time.monotonic() - job.begun_s)
        if job.failure is not None and not self._failed_jobs:
            self._failed_jobs = True
            logger.warning("the store of rows has failed, %s: %s; further times are counted", job.name, job.failure)
        for why, blocks in job.not_restored.items() if isinstance(job, RestoreJob) else ():
            self.meter.miss(NOT_RESTORED[why], blocks * self.engine.tokens)

    def _counters(self) -> dict[str, Any]:
        """The present counters of each tier."""
        node = self.transfers and self.transfers.crossing.node.counters
        store = self.blocks.store and self.blocks.store.counters
        return {"blocks": self.blocks.counters, "store": store or {}, "transfer": node or {}}

    def settle(self) -> None:
        """Wait until the host's part of all steps is done, at most :data:`RESTORE_S`."""
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


def _after(done: torch.Event | torch.cuda.Event, call: Callable[[], None]) -> None:
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
    """The part of a tensor-parallel rank: the first one has the rows, because the routers of all ranks choose the same.

    If ranks have ``divided`` the heads of the KV, the others fold theirs for the witness; else the first has all heads.
    ``group`` are all ranks, on the device of the KV.
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
