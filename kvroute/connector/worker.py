"""The worker's end: the rows of steps, and their life. How rows arrive beside KV from outside is the carrier's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import distributed

import kvroute
from kvroute.capture.step_ids import StepIds
from kvroute.capture.step_weights import NoStepWeights, StepWeights
from kvroute.connector.behind import AtOnce, Behind
from kvroute.connector.carriers.port import WorkerParts
from kvroute.connector.engine import Engine
from kvroute.connector.messages import Handshake, StepMeta, WorkerMeta
from kvroute.connector.meter import Meter
from kvroute.connector.mtp import MtpIds, NoMtpIds
from kvroute.connector.witness import Join, OtherRank, to_host
from kvroute.connector.written import write_ids
from kvroute.witness import Run

logger = logging.getLogger(__name__)

NO_SLOTS: Final = "the engine did not say where a step's tokens are"


class LoadedKv(NamedTuple):
    """KV that was loaded, and the carrier's look at it."""

    runs: Sequence[Run]
    look: Any


class WorkerRows:
    """Applies what the scheduler says, and writes a step's rows when it is over. Nothing here raises inside a step.

    ``kv_caches`` are the layers' KV by name, as :func:`witnessing` needs them. The routers call the hooks of
    :attr:`ids`. Each step is :meth:`begin`, its slots in :attr:`slots` (int64 ``[tokens]``, negative: padding), and
    :meth:`end`; a step that computes nothing has no slots. Blocks whose KV could not be loaded are given to
    :meth:`fail` before it. See :func:`rank_part` for ``joined``, and :class:`~kvroute.capture.step_ids.StepIds` for
    ``join_shards``.

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
        join_shards: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.engine = engine
        settings = engine.settings
        self._device = next(iter(kv_caches.values())).device
        self._on_cpu = self._device.type == "cpu"  # asked for once: it takes as long as a small array
        self.store = engine.carrier.store(settings)
        self.blocks = kvroute.AuxBlocks(
            engine.layout.specs,
            blocks=engine.places.stop,
            namespace=engine.namespace,
            store=self.store,
            required=engine.of_a_row,
            memory="sparse" if engine.shares_blocks else "shared",
            strict=settings.strict,
        )
        self.meter = Meter(self._counters, engine.limits)
        self.missing = self.meter.missing  # numbers of tokens without rows, by cause
        self.carrier = engine.carrier.worker(
            WorkerParts(settings, engine.limits, engine.spec, engine.blocks, self.blocks, self.meter, kv_caches, joined)
        )
        wants_weights = settings.routing_weights
        self._weights_behind_ids = wants_weights and not self._on_cpu
        self.ids = StepIds(
            *(engine.spec, engine.max_tokens, self._device, join_shards), weights=self._weights_behind_ids
        )
        self.weights = StepWeights(engine.spec) if wants_weights and self._on_cpu else NoStepWeights()
        self.mtp = NoMtpIds() if engine.mtp is None else MtpIds(engine.mtp)
        self._slots: torch.Tensor | None = None
        late = not self._on_cpu if late is None else late
        self._behind: Behind | AtOnce = AtOnce()
        if late:
            self._behind = Behind("kvroute-behind", self._lose, engine.limits.pending_max)
        self._waits_for_device = late and not self._on_cpu
        self._counts_steps = late or engine.stages > 1  # else a step is over with its outputs
        self._slots_stay = not late and not engine.drafts  # until the step's end, their last reader's
        self._lost: BaseException | None = None
        self._step: StepMeta | None = None
        self._begun = False  # on the host
        self._failed: set[int] = set()  # blocks whose KV has not come, in the step at hand
        self._failed_untold: set[int] = set()
        kvroute.preload()

    @property
    def hook_weights(self) -> Callable[[int], Callable[..., None]] | None:
        """What makes a layer's callback for its weights; ``None``: they are not wanted."""
        if self._weights_behind_ids:
            return self.ids.hook_weights
        return self.weights.hook if isinstance(self.weights, StepWeights) else None

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
        layer_ids = self.engine.spec.attrs["layer_ids"]
        return Handshake(inner, region.name, self._counts_steps, self.carrier.greeting, layer_ids)

    # ---------------------------------------------------------------- a step, as it is launched

    def begin(self, step: StepMeta) -> None:
        """A step begins: what has become of blocks until now. Unless that hurries, the host hears of it at the end."""
        if self._step is not None and not self._begun:  # its end never came
            self._then(self._begin_on_host, self._step, None)
        self._step = step
        self._slots = None
        self.ids.begin()
        self.weights.begin()
        self.mtp.begin()
        hurries = self.carrier.begun(step)
        self._begun = hurries or bool(step.loads.joined or step.loads.landed)
        if self._begun:
            self._then(self._begin_on_host, step, self._look(step.loads.landed))

    def fail(self, blocks: set[int]) -> None:
        """The KV of these blocks could not be loaded; a connector says so once. :meth:`failures` tells the
        scheduler."""
        if blocks:
            self._failed |= blocks
            self._failed_untold |= blocks
            self.carrier.fail(blocks)

    def failures(self) -> set[int]:
        """The failed blocks that the scheduler has not been told of."""
        untold = self._failed_untold
        self._failed_untold = set()
        return untold

    def arrived(
        self,
        requests: AbstractSet[str],
        failed: AbstractSet[str] = frozenset(),
    ) -> set[str]:
        """The KV of these ``requests`` has come, or has ``failed`` to: which of all that wait for rows go on now."""
        return self.carrier.arrived(requests, failed)

    def told(self, inner: Any = None) -> Any:
        """The message for the scheduler after a step, beside the ``inner`` connector's."""
        message = self.carrier.told()
        return inner if message is None else WorkerMeta(inner, message)

    def end(self) -> None:
        """The step is over."""
        step = self._step
        self._step = None
        failed = self._failed
        self._failed = set()
        if step is None:
            return
        redone: list[int] = []
        if failed:  # tokens computed from KV that had not come will be computed again
            redone = [block for table in step.loads.joined if not failed.isdisjoint(table) for block in table]
        slots = self._slots
        ids: torch.Tensor | str = NO_SLOTS
        weights: torch.Tensor | str | None = None
        if slots is not None:
            ids = self.ids.take(slots.shape[0])
            weights = self.weights.take(slots.shape[0])
        loaded = self._look(step.loads.runs)
        computed = self.carrier.computed(step)
        if slots is not None and not self._on_cpu:  # else both are this step's own
            slots = to_host(slots)
            ids = ids if isinstance(ids, str) else to_host(ids)
        begun = self._begun
        self._begun = True
        self._then(self._end_on_host, step, begun, loaded, failed, slots, ids, weights, redone, computed)

    def _look(self, runs: Sequence[Run]) -> LoadedKv | None:
        """Look at the loaded KV of these blocks."""
        return LoadedKv(runs, self.carrier.look(runs)) if runs else None

    def _then(self, work: Callable[..., None], *arguments: Any) -> None:
        """Do this when the device has done the work launched until now: on a CPU at once."""
        call = partial(work, *arguments)
        if self._lost is not None and self.engine.settings.strict:
            raise self._lost
        if self._waits_for_device:
            done = torch.cuda.Event(blocking=True) if self._device.type == "cuda" else torch.Event(self._device)
            done.record()  # on CUDA the thread behind sleeps; torch.Event ignores ``blocking``, and spins
            call = partial(_call_after, done, call)
        self._behind.put(call)

    def _lose(self, error: BaseException) -> None:
        """A step's work on the host has failed: the state of its blocks is unknown, so forget all rows."""
        self._lost = error
        self.blocks.forget()

    # ---------------------------------------------------------------- and on the host, behind the device

    def _begin_on_host(self, step: StepMeta, landed: LoadedKv | None) -> None:
        try:
            if step.before:
                self.blocks.apply(step.before)
        finally:  # a carrier ends what it has begun, though the lives that the step means are none
            self.carrier.start(step)
        if landed:
            self.carrier.land()
            self.carrier.compare(*landed)

    def _end_on_host(
        self,
        step: StepMeta,
        begun: bool,
        loaded: LoadedKv | None,
        failed: Collection[int],
        slots: torch.Tensor | None,
        ids: torch.Tensor | str,
        weights: torch.Tensor | str | None,
        redone: Sequence[int],
        computed: Any,
    ) -> None:
        try:
            if not begun and step.before:
                self._begin_on_host(step, None)
            if loaded:
                self.carrier.land()
            if failed:
                self.blocks.forget(sorted(failed))
            if loaded:
                self.carrier.compare(*loaded)  # before the step counts as over: then its rows are trusted
            if slots is not None:
                self._write(slots, ids, weights, step, redone)
            elif step.tokens:  # rows that it overwrote, for example a draft's, must not stay
                self.meter.miss(NO_SLOTS, step.tokens)
                self.blocks.forget()
        except BaseException:
            self.blocks.forget()  # before the step counts as over, so that its rows are missing
            raise
        finally:
            if self._counts_steps:
                self.blocks.renew([self.engine.clock], [step.number])
        self.carrier.filled(step, computed)

    def _write(
        self,
        slots: torch.Tensor,
        ids: torch.Tensor | str,
        weights: torch.Tensor | str | None,
        step: StepMeta,
        blocks: Sequence[int],
    ) -> None:
        """Write the ids of the tokens at these slots, with their weights where these are wanted; the tokens of
        ``blocks`` are computed again, and get no rows."""
        if isinstance(weights, str) and not isinstance(ids, str):
            ids = weights  # never one without the other
        slot_numbers = slots.numpy()
        by_id = weights.numpy() if isinstance(weights, torch.Tensor) else None
        redone = np.isin(slot_numbers // self.engine.tokens, blocks) if blocks else None
        numbers = ids if isinstance(ids, str) else ids.numpy()
        if self._weights_behind_ids and not isinstance(numbers, str):
            numbers, by_id = self.ids.split(numbers)
        number = step.number if self.engine.stages > 1 else None
        write_ids(
            *(self.blocks, self.meter, self.engine.spec, slot_numbers, numbers, step.version, redone),
            step=number,
            beside=self.mtp.take(slot_numbers),
            weights=by_id,
        )

    # ---------------------------------------------------------------- what is counted, and the end

    def _counters(self) -> dict[str, Any]:
        """The present counters of each tier."""
        return {"blocks": self.blocks.counters, **self.carrier.counters()}

    def settle(self) -> None:
        """Wait until the host's part of all steps is done, at most ``limits.settle_s``."""
        self._behind.settle(self.engine.limits.settle_s)

    def close(self) -> None:
        if not self._behind.close(self.engine.limits.settle_s):
            logger.warning("the device is not done with the last steps: their rows stay behind")
            return
        self.carrier.close()
        self.blocks.close()
        if self.store is not None:
            self.store.close()


def _call_after(done: torch.Event | torch.cuda.Event, call: Callable[[], None]) -> None:
    done.synchronize()
    call()


def rank_part(
    engine: Engine,
    kv_caches: Mapping[str, torch.Tensor],
    group: distributed.ProcessGroup,
    *,
    divided: bool,
    join_shards: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> WorkerRows | OtherRank | None:
    """The part of a tensor-parallel rank: the first one has the rows, because the routers of all ranks choose the same.

    If ranks have ``divided`` the heads of the KV, the others fold theirs for the witness; else the first has all heads.
    ``group`` are all ranks, on the device of the KV.
    """
    rank = distributed.get_rank(group)
    folds = divided and distributed.get_world_size(group) > 1
    joined = partial(distributed.all_reduce, group=group) if folds else None
    if not rank:
        return WorkerRows(engine, kv_caches, joined, join_shards=join_shards)
    return engine.carrier.other_rank(engine.spec, kv_caches, rank, joined, engine.limits)


__all__ = ["WorkerRows", "rank_part"]
