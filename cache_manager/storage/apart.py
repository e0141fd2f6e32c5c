"""A store in a process of its own: one that hangs, crashes or is killed costs an error, never a hang.

The process is killed *and reaped* before anybody hears that it is lost, so nothing of it touches memory from then on. A
call that it was asked may have been done or not; one that was answered was. A thread starts another process after a
pause; pauses grow until a call succeeds, and calls meanwhile fail at once.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from itertools import accumulate
from queue import Empty, LifoQueue
from typing import Any, Final, TypeVar

from cache_manager import errors
from cache_manager.child import AskedChild, Child
from cache_manager.errors import ConfigError, KVRouteError, StorageError, StoreClosedError, StoreUnavailableError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.record import Buffer, RecordHeader
from cache_manager.spec import align
from cache_manager.storage import apart_process as ask
from cache_manager.storage.apart_process import CALLS_MAX, Answer
from cache_manager.storage.batch import chunks, flat
from cache_manager.storage.guard import ClosingStore, OpenCheck
from cache_manager.storage.url import StoreUrl

logger = logging.getLogger(__name__)

KEYS_MAX: Final = 500
"""Of one message. So many calls of this many stay under 2048 transfers, which is what one peer of Mooncake bears."""
PAGE_NBYTES: Final = 4096
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ApartSettings:
    """Limits. A message that is not answered within ``call_s`` ends the process, and with it every call in flight; a
    call sends no further one when ``call_s`` is over."""

    call_s: float = 30.0
    set_up_s: float = 60.0
    close_s: float = 10.0
    restart_pause_s: float = 0.1
    restart_pause_max_s: float = 10.0
    arena_nbytes: int = 64 << 20

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 < getattr(self, field.name) < float("inf"):
                raise ConfigError(field.name, "a finite number, more than 0", getattr(self, field.name))


def open_apart_store(url: StoreUrl) -> ApartStore:
    """``apart:URL`` or ``apart:?arena=64MiB&call=30s,URL``: the store at that URL, in a process of its own."""
    url.allow("arena", "call")
    if len(url.tiers) != 1:
        raise ConfigError("apart: store path", "one store's URL", repr(url.path))
    call_s, arena_nbytes = url.seconds("call", 30.0), url.nbytes("arena", 64 << 20)
    assert call_s is not None
    return ApartStore(Apart(url.tiers[0], ApartSettings(call_s=call_s, arena_nbytes=arena_nbytes)))


@dataclass(slots=True)
class Slot:
    """Where the payloads of one message lie in the arena. ``call`` is what was asked of them."""

    offsets: list[int]
    call: Future[Answer] | None = None


class Apart:
    """The process of the moment, ``python -m module``, with the store at ``url`` ("" for none). Any thread asks.

    It is started here: raises what opening the store raises, and :class:`StorageError` where no process can be.
    ``opens`` is what the process is told to open, where that is not the URL. ``counts``: ``lost_calls``, ``restarts``,
    ``bypassed`` (calls while there was no process), and what the process has counted.
    """

    def __init__(
        self, url: str, settings: ApartSettings | None = None, module: str = ask.__name__, opens: str = ""
    ) -> None:
        self.settings = s = settings or ApartSettings()
        self.url, self.module, self.opens = url, module, opens or url
        self.record_nbytes_max = self.margin_nbytes = 0
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()  # guards what follows; never held over a wait
        self.guard = OpenCheck(f"apart:{url}", self._lock)
        self._worker: _Worker | None = None
        self._restarter: threading.Thread | None = None
        self._pause_s, self._not_before_s, self._cause = s.restart_pause_s, 0.0, ""
        self._closing = threading.Event()
        self.slot_nbytes = align(-(-s.arena_nbytes // CALLS_MAX), PAGE_NBYTES)
        self.arena_nbytes = CALLS_MAX * self.slot_nbytes
        self.fd = os.memfd_create("kvroute-arena", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, self.arena_nbytes)
            self.memory = memoryview(mmap.mmap(self.fd, self.arena_nbytes))
            self._slots: LifoQueue[int] = LifoQueue()  # the one that was used last is in the processor's cache
            for slot in range(CALLS_MAX):
                self._slots.put(slot * self.slot_nbytes)
            self._start()
        except BaseException:
            os.close(self.fd)
            raise

    @property
    def pid(self) -> int | None:
        """The process of the moment; ``None`` while there is none that takes calls."""
        worker = self._worker
        return worker.pid if worker is not None and worker.serves and not worker.gone else None

    def ready(self) -> bool:
        """Whether a process takes calls; if not, one is started when it is time for it."""
        self.guard.check()
        if self.pid is None:
            self._bring_back()
        return self.pid is not None

    def check(self) -> None:
        """:class:`StoreUnavailableError` while there is no process."""
        if not self.ready():
            self.count(bypassed=1)
            raise StoreUnavailableError(f"{self.url}: its process was lost, and is being replaced: {self._cause}")

    @contextmanager
    def slot(self, sizes: Sequence[int]) -> Iterator[Slot]:
        """Room for each size and its margin, each on a cache line of its own; the caller's within the block.

        It is free again when the message that was made of it has been answered, or its process is gone.
        """
        self.check()  # before a slot is waited for and filled
        margin = self.margin_nbytes
        ends = list(accumulate([align(margin + size) for size in sizes], initial=0))
        assert ends.pop() <= self.slot_nbytes, f"{sum(sizes)} bytes for a slot of {self.slot_nbytes}"
        try:
            at = self._slots.get(timeout=self.settings.call_s + self.settings.close_s)
        except Empty:
            raise StoreUnavailableError(f"{self.url}: all slots of the arena stay taken: no call ends") from None
        slot = Slot([at + end + margin for end in ends])
        try:
            yield slot
        finally:
            if slot.call is None:
                self._slots.put(at)
            else:
                slot.call.add_done_callback(lambda _: self._slots.put(at))

    def call(self, command: ask.Command, slot: Slot | None = None, *, reaped: bool = False) -> Answer:
        """Ask, with what lies in ``slot``, and wait: ``call_s``, and until a process that is lost is reaped.

        Raises what the store raised, :class:`StoreUnavailableError` when the process is lost or not there. With
        ``reaped`` it waits as long as it takes, so that nothing touches what the command names.
        """
        self.check()
        assert self._worker is not None
        future = self._worker.begin(command, self.settings.call_s)
        if slot is not None:
            slot.call = future
        try:
            answer = future.result(None if reaped else self.settings.call_s + self.settings.close_s)
        except TimeoutError:  # it was killed long ago; the kernel keeps it, in a call that does not end
            raise StoreUnavailableError(f"{self.url}: the process does not end") from None
        self._pause_s = self.settings.restart_pause_s
        return answer

    def count(self, **by: int) -> None:
        with self._lock:
            self.counts.update(by)

    def close(self) -> None:
        """End the process: properly within ``close_s``, by force after. Idempotent; nothing in a forked child."""
        if not self.guard.close():
            return
        self._closing.set()
        with self._lock:
            worker, restarter, close_s = self._worker, self._restarter, self.settings.close_s
        if worker is not None and not worker.gone:
            try:
                if worker.serves:
                    worker.begin(ask.Call("close"), close_s).result()
                    worker.join(close_s)
            except KVRouteError as error:
                logger.warning("%s: the process did not close: %s", self.url, error)
            worker.kill()
            worker.join(close_s)
        if restarter is not None:
            restarter.join(close_s)
        os.close(self.fd)

    def _start(self) -> None:
        """Start a process and open its store; by one thread at a time."""
        try:
            worker = _Worker(self)
        except OSError as error:  # no process, thread or descriptor is left
            raise StorageError(f"{self.url}: no process can be started: {error}") from error
        with self._lock:
            self._worker = worker  # close() finds it, whatever it has come to
        try:
            self.guard.check()
            opened = worker.begin(ask.Open(self.opens, self.arena_nbytes), self.settings.set_up_s).result()
        except BaseException:
            worker.kill()
            worker.join(self.settings.close_s)
            raise
        self.margin_nbytes = opened.usage["margin_nbytes"]
        self.record_nbytes_max = min(self.slot_nbytes - self.margin_nbytes, opened.usage["record_nbytes_max"])
        worker.serves = True

    def lost(self, cause: str, calls: int = 0) -> None:
        """A process has ended and was reaped, or there is none: a thread starts another one, unless one does."""
        with self._lock:
            self._cause, self._not_before_s = cause, time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, self.settings.restart_pause_max_s)
            self.counts["lost_calls"] += calls
        if not self._closing.is_set():
            logger.error("%s: the process was lost with %d calls: %s", self.url, calls, cause)
            self._bring_back()

    def _bring_back(self) -> None:
        with self._lock, suppress(RuntimeError):  # no thread is left: the next call tries again
            if self._restarter is None:
                restarter = threading.Thread(target=self._restart, name="kvroute-apart-restart", daemon=True)
                restarter.start()
                self._restarter = restarter

    def _restart(self) -> None:
        while not self._closing.wait(max(self._not_before_s - time.monotonic(), 0)):
            try:
                self._start()
                self.count(restarts=1)
            except KVRouteError as error:
                self.lost(f"not started again: {error}")
            with self._lock:
                if self.pid is not None:
                    self._restarter = None
                    return


class _Worker(AskedChild[Answer]):
    """One process of an :class:`Apart`."""

    def __init__(self, apart: Apart) -> None:
        self._apart = apart
        self._said = ""  # why it asked to be ended
        self.serves = False  # it has opened its store
        super().__init__(Child(apart.module, apart.fd), "kvroute-apart")

    def begin(self, command: ask.Command, within_s: float) -> Future[Answer]:
        return self.ask(lambda number: ask.encode(ask.Asked(number, command)), within_s)

    def _decoded(self, body: bytes) -> tuple[int, Answer | Exception]:
        answer = ask.decode_answer(body)
        if answer.counts:
            self._apart.count(**answer.counts)
        if answer.failure is None:
            return answer.number, answer
        if answer.failure.ends:
            self._said = answer.failure.message
            self.kill()
        return answer.number, _error_of(answer.failure)

    def _ended(self, cause: str, lost: int) -> None:
        if self.serves:
            self._apart.lost(self._said or cause, lost)

    def _lost(self, cause: str) -> Exception:
        with suppress(StoreClosedError):
            self._apart.guard.check()
            return StoreUnavailableError(f"{self._apart.url}: the process was lost: {cause}")
        return StoreClosedError(f"{self._apart.url}: the store was closed meanwhile")


def _error_of(failure: ask.Failure) -> Exception:
    kind: Any = getattr(errors, failure.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, KVRouteError)):
        return StorageError(failure.message)
    error: KVRouteError = kind.__new__(kind, failure.message)
    vars(error).update(failure.fields)
    return error


class ApartStore(ClosingStore):
    """A ``StorageBackend`` and ``BoundedBackend`` whose store is in another process; it closes ``apart``.

    Raises what the store raises, and :class:`StoreUnavailableError` when the process is lost, too slow or not there.
    """

    def __init__(self, apart: Apart) -> None:
        self.apart = apart

    @property
    def record_nbytes_max(self) -> int:
        """A record fits a slot of the arena; the store's own bound, where that is less."""
        return self.apart.record_nbytes_max

    @property
    def counters(self) -> Mapping[str, int]:
        """What has been met so far, by name; see :class:`Apart`."""
        with self.apart._lock:
            return Counter(self.apart.counts)

    def put(
        self, headers: Sequence[RecordHeader], payloads: Sequence[Buffer], *, replace: bool = False
    ) -> list[RecordHeader | None]:
        memory = self.apart.memory
        records = [(header, flat(header, payload)) for header, payload in zip(headers, payloads, strict=True)]
        stored: dict[BlockKey, RecordHeader | None] = {}
        parts = 0
        for part in self._parts(records, lambda each: each[1].nbytes):
            with self.apart.slot([payload.nbytes for _, payload in part]) as slot:
                for (_, payload), at in zip(part, slot.offsets, strict=True):
                    memory[at : at + payload.nbytes] = payload
                offered = [header for header, _ in part]
                answer = self.apart.call(self._asked_to_put(offered, slot.offsets, replace), slot)
            for header, each in zip(offered, answer.stored, strict=True):
                stored[header.key] = offered[each] if isinstance(each, int) else each
            parts += 1
        if parts > 1:  # a later part may have taken the room of an earlier one's
            there = dict(zip(stored, self.contains(list(stored)), strict=True))
            stored = {key: header for key, header in stored.items() if there[key]}
        return [stored.get(header.key) for header in headers]

    def _asked_to_put(self, headers: list[RecordHeader], offsets: list[int], replace: bool) -> ask.Put:
        return ask.Put(headers, offsets, replace)

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[RecordHeader | Absence]:
        memory, answers = self.apart.memory, list[RecordHeader | Absence]([Absence.MISS] * len(keys))
        for part in self._parts([*enumerate(buffers)], lambda each: each[1].nbytes):
            sizes = [buffer.nbytes for _, buffer in part]
            with self.apart.slot(sizes) as slot:
                answer = self.apart.call(ask.Get([keys[i] for i, _ in part], slot.offsets, sizes), slot)
                for (i, buffer), at, each in zip(part, slot.offsets, answer.found, strict=True):
                    answers[i] = each
                    if isinstance(each, RecordHeader):
                        buffer.cast("B")[:] = memory[at : at + buffer.nbytes]
        return answers

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [each for part in self._parts(keys) for each in self._asked(ask.Call("contains", part)).there]

    def delete(self, keys: Sequence[BlockKey]) -> None:
        for part in self._parts(keys):
            self._asked(ask.Call("delete", part))

    def flush(self) -> None:
        self._asked(ask.Call("flush"))

    def usage(self) -> Mapping[str, int]:
        return self._asked(ask.Call("usage")).usage

    def close(self) -> None:
        self.apart.close()

    def _asked(self, command: ask.Command) -> Answer:
        with self.apart.slot([]) as slot:
            return self.apart.call(command, slot)

    def _parts(self, items: Sequence[_T], nbytes: Callable[[_T], int] | None = None) -> Iterator[list[_T]]:
        """``items``, as many at a time as a message and a slot bear; without those that no slot holds."""
        self.apart.check()
        apart, give_up_s = self.apart, time.monotonic() + self.apart.settings.call_s

        def room(item: _T) -> int:
            return align(apart.margin_nbytes + nbytes(item)) if nbytes else 0

        fit = [item for item in items if room(item) <= apart.slot_nbytes]
        for number, part in enumerate(chunks(fit, room, apart.slot_nbytes, KEYS_MAX)):
            if number and time.monotonic() > give_up_s:
                raise StorageError(f"{apart.url}: {apart.settings.call_s} s were over before all of {len(items)} keys")
            yield part


__all__ = ["Apart", "ApartSettings", "ApartStore", "open_apart_store"]
