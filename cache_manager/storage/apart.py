"""A store in a process of its own: one that hangs, crashes or is killed costs an error, never a hang.

The process is killed *and reaped* before a caller hears that it is lost, so it touches no memory from then on. An
unanswered call may have been done or not; an answered one was done. A thread starts another process after a pause;
pauses grow until a call succeeds, and calls meanwhile fail at once.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import accumulate
from queue import Empty, LifoQueue
from typing import Any, Final

import msgspec

from cache_manager.child import Child, LostError
from cache_manager.errors import ConfigError, KVRouteError, StorageError, StoreClosedError, StoreUnavailableError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.record import Buffer, RecordHeader
from cache_manager.spec import align
from cache_manager.storage import apart_process
from cache_manager.storage.apart_process import CALLS_MAX, decode, encode
from cache_manager.storage.batch import flat
from cache_manager.storage.guard import ClosingStore, OpenCheck
from cache_manager.storage.url import StoreUrl

logger = logging.getLogger(__name__)

KEYS_MAX: Final = 500
"""Keys of one call. ``CALLS_MAX`` such calls stay under 2048 transfers, which is what one peer of Mooncake bears."""
PAGE_NBYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class ApartSettings:
    """Limits. A question that is not answered within ``call_s`` ends the process, and with it all its open questions; a
    call asks no further question after ``call_s``."""

    call_s: float = 30.0
    set_up_s: float = 60.0
    close_s: float = 10.0
    restart_pause_s: float = 0.1
    restart_pause_max_s: float = 10.0
    arena_nbytes: int = 64 << 20

    def __post_init__(self) -> None:
        for each in fields(self):
            if not 0 < getattr(self, each.name) < float("inf"):
                raise ConfigError(each.name, "a finite number, more than 0", getattr(self, each.name))


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
    """A channel to the process and its part of the arena, at ``at``, for one question at a time."""

    number: int
    at: int
    asked: Child | None = None
    """The process that may use the bytes, until it has answered or is gone."""


class Apart:
    """The current process, ``python -m module``, with the store at ``url`` ("" for none). Any thread may ask it.

    The constructor starts it: raises what opening the store raises, and :class:`StorageError` if no process can be
    started. ``opens`` is what the process opens, if that is not the URL. ``counts``: ``lost_calls``, ``restarts``,
    ``bypassed`` (calls while there was no process), and the process's own counts. A store that reports itself
    unavailable is opened anew in another process.
    """

    def __init__(
        self, url: str, settings: ApartSettings | None = None, module: str = apart_process.__name__, opens: str = ""
    ) -> None:
        self.settings = s = settings or ApartSettings()
        self.url, self.module, self.opens = url, module, opens or url
        self.record_nbytes_max = self.margin_nbytes = 0
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()  # guards the counts and the next three; never held over a wait
        self._child: Child | None = None
        self._cause = ""
        self._stuck: list[Slot] = []  # used by processes that are not gone yet
        self._newest: Child | None = None  # its store may not be open yet
        self._pause_s = s.restart_pause_s
        self._closing = threading.Event()
        self.guard = OpenCheck(f"apart:{url}", self._lock)
        self.slot_nbytes = align(-(-s.arena_nbytes // CALLS_MAX), PAGE_NBYTES)
        self.arena_nbytes = CALLS_MAX * self.slot_nbytes
        self._slots: LifoQueue[Slot] = LifoQueue()  # the slot that was used last is in the processor's cache
        for number in range(CALLS_MAX):
            self._slots.put(Slot(number, number * self.slot_nbytes))
        self._fd = os.memfd_create("kvroute-arena", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._fd, self.arena_nbytes)
            self.memory = memoryview(mmap.mmap(self._fd, self.arena_nbytes))
            opened = Future[None]()
            self._keeper = threading.Thread(target=self._keep, args=(opened,), name="kvroute-apart", daemon=True)
            self._keeper.start()
            opened.result(s.set_up_s + s.close_s)
        except BaseException as error:
            self._closing.set()
            if self._newest is not None:
                self._newest.kill()
            os.close(self._fd)
            if isinstance(error, RuntimeError | TimeoutError):  # no thread to be had; or the kernel keeps the process
                raise StorageError(f"{url}: no process can be started: {error}") from error
            raise

    @property
    def pid(self) -> int | None:
        """The current process's id; ``None`` while none takes calls."""
        child = self._child
        return None if child is None else child.pid

    def check(self) -> Child:
        """The process that takes calls now; :class:`StoreUnavailableError` while there is none."""
        self.guard.check()
        if (child := self._child) is None:
            self.count(bypassed=1)
            raise StoreUnavailableError(f"{self.url}: its process was lost, and is being replaced: {self._cause}")
        return child

    @contextmanager
    def slot(self) -> Iterator[Slot]:
        """A slot of the arena, for the ``with`` block. Another call gets it after the last question is answered, or the
        process that was asked is gone."""
        self.check()  # before waiting for a slot and filling it
        try:
            slot = self._slots.get(timeout=self.settings.call_s + self.settings.close_s)
        except Empty:
            raise StoreUnavailableError(f"{self.url}: all slots of the arena stay taken: no call ends") from None
        try:
            yield slot
        finally:
            with self._lock:
                if slot.asked is None or slot.asked.gone.is_set():
                    self._slots.put(slot)
                else:
                    self._stuck.append(slot)

    def call(self, slot: Slot, what: str, *takes: object, reaped: bool = False) -> Any:
        """Ask, with the slot's content, and wait: up to ``call_s``, then until a lost process is reaped.

        Raises what the store raised, :class:`StoreUnavailableError` when the process is lost or not there. With
        ``reaped`` that wait has no limit, so that nothing touches the memory that the call names.
        """
        child = self.check()
        try:
            gives = self._ask(child, slot, self.settings.call_s, what, *takes)
        except LostError as error:
            with self._lock:
                self.counts["lost_calls"] += 1
                self._cause = str(error)
            if not child.gone.wait(None if reaped else self.settings.close_s):
                raise StoreUnavailableError(f"{self.url}: the process does not end") from error
            if self._closing.is_set():
                raise StoreClosedError(f"{self.url}: the store was closed meanwhile") from error
            raise StoreUnavailableError(f"{self.url}: the process was lost: {error}") from error
        self._pause_s = self.settings.restart_pause_s
        return gives

    def ask(self, what: str, *takes: object, reaped: bool = False) -> Any:
        """A :meth:`call` that has no records."""
        with self.slot() as slot:
            return self.call(slot, what, *takes, reaped=reaped)

    def _ask(self, child: Child, slot: Slot, within_s: float, what: str, *takes: object) -> Any:
        slot.asked = child
        body = child.ask(slot.number, encode((what, takes)), within_s)
        try:
            gives, failure, counts = decode(what, body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            child.kill()
            raise LostError("its message was no answer") from error
        slot.asked = None
        self.count(**counts)
        if failure is None:
            return gives
        raised = failure.error()
        if isinstance(raised, StoreUnavailableError):
            with self._lock:
                self._child, self._cause = None, str(raised)
            child.kill()
        raise raised

    def count(self, **by: int) -> None:
        with self._lock:
            self.counts.update(by)

    def close(self) -> None:
        """End the process; its store is closed first, if that takes at most ``close_s``. A call in flight may raise
        :class:`StoreClosedError`. Idempotent; does nothing in a forked child."""
        if not self.guard.close():
            return
        self._closing.set()
        close_s = self.settings.close_s
        if (child := self._child) is not None:
            try:
                slot = self._slots.get(timeout=close_s)
                self._ask(child, slot, close_s, "close")
                self._slots.put(slot)
            except (KVRouteError, LostError, Empty) as error:
                logger.warning("%s: the process did not close: %r", self.url, error)
        if self._newest is not None:
            self._newest.kill()
        self._keeper.join(close_s)
        if not self._keeper.is_alive():
            os.close(self._fd)

    def _keep(self, opened: Future[None]) -> None:
        """Start one process after another until this is closed; ``opened`` gets the result of the first."""
        while not self._closing.is_set():
            cause = ""
            try:
                child = self._start()
            except KVRouteError as error:
                if not opened.done():
                    opened.set_exception(error)
                    return
                cause = f"not started again: {error}"
            else:
                if opened.done():
                    self.count(restarts=1)
                else:
                    opened.set_result(None)
                status = child.wait()
            with self._lock:
                self._child, self._cause = None, cause or f"{self._cause or 'it has ended'} (status {status})"
                while self._stuck:
                    self._slots.put(self._stuck.pop())
            if not self._closing.is_set():
                logger.error("%s: the process was lost: %s", self.url, self._cause)
            pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, self.settings.restart_pause_max_s)
            self._closing.wait(pause_s)

    def _start(self) -> Child:
        """A process whose store is open."""
        try:
            child = self._newest = Child(self.module, CALLS_MAX, self._fd)
        except OSError as error:
            raise StorageError(f"{self.url}: no process can be started: {error}") from error
        try:
            if self._closing.is_set():  # close() may have seen only the process before
                raise StoreClosedError(f"{self.url}: the store was closed meanwhile")
            slot = Slot(0, 0)  # no other thread asks this process yet
            opened = self._ask(child, slot, self.settings.set_up_s, "open", self.opens, self.arena_nbytes)
        except (KVRouteError, LostError) as error:
            child.kill()
            child.wait()
            if isinstance(error, KVRouteError):
                raise
            raise StoreUnavailableError(f"{self.url}: the process was lost: {error}") from error
        bound, self.margin_nbytes = opened
        self.record_nbytes_max = min(self.slot_nbytes - self.margin_nbytes, bound)
        with self._lock:
            self._child, self._cause = child, ""
        return child


class ApartStore(ClosingStore):
    """A ``StorageBackend`` and ``BoundedBackend`` whose store is in another process; it closes ``apart``.

    Raises what the store raises, and :class:`StoreUnavailableError` when the process is lost, too slow or not there.
    """

    def __init__(self, apart: Apart) -> None:
        self.apart = apart

    @property
    def record_nbytes_max(self) -> int:
        """The largest payload: as a slot of the arena or the store allows, whichever is less."""
        return self.apart.record_nbytes_max

    @property
    def counters(self) -> Mapping[str, int]:
        """Counts so far, by name; see :class:`Apart`."""
        with self.apart._lock:
            return Counter(self.apart.counts)

    def put(
        self, headers: Sequence[RecordHeader], payloads: Sequence[Buffer], *, replace: bool = False
    ) -> list[RecordHeader | None]:
        flats, memory = list(map(flat, headers, payloads)), self.apart.memory
        stored: dict[BlockKey, RecordHeader | None] = {}
        parts = 0
        for part in self._parts([header.key for header in headers], [payload.nbytes for payload in flats]):
            with self.apart.slot() as slot:
                places = self._places(slot, [flats[i].nbytes for i in part])
                for i, at in zip(part, places, strict=True):
                    memory[at : at + flats[i].nbytes] = flats[i]
                answer = self.apart.call(slot, "put", [headers[i] for i in part], places, replace)
            for i, each in zip(part, answer, strict=True):
                stored[headers[i].key] = headers[part[each]] if isinstance(each, int) else each
            parts += 1
        if parts > 1:  # a later part may have taken the room of an earlier part
            there = dict(zip(stored, self.contains(list(stored)), strict=True))
            stored = {key: header for key, header in stored.items() if there[key]}
        return [stored.get(header.key) for header in headers]

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[RecordHeader | Absence]:
        memory, found = self.apart.memory, list[RecordHeader | Absence]([Absence.MISS] * len(keys))
        for part in self._parts(keys, [buffer.nbytes for buffer in buffers]):
            sizes = [buffers[i].nbytes for i in part]
            with self.apart.slot() as slot:
                places = self._places(slot, sizes)
                answer = self.apart.call(slot, "get", [keys[i] for i in part], places, sizes)
                for i, at, each in zip(part, places, answer, strict=True):
                    found[i] = each
                    if isinstance(each, RecordHeader):
                        buffers[i].cast("B")[:] = memory[at : at + buffers[i].nbytes]
        return found

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [each for part in self._parts(keys) for each in self.apart.ask("contains", [keys[i] for i in part])]

    def delete(self, keys: Sequence[BlockKey]) -> None:
        for part in self._parts(keys):
            self.apart.ask("delete", [keys[i] for i in part])

    def flush(self) -> None:
        self.apart.ask("flush")

    def usage(self) -> Mapping[str, int]:
        usage: Mapping[str, int] = self.apart.ask("usage")
        return usage

    def close(self) -> None:
        self.apart.close()

    def _places(self, slot: Slot, sizes: Sequence[int]) -> list[int]:
        """A place in a slot for each size and its margin."""
        margin = self.apart.margin_nbytes
        *places, end = accumulate([align(size + margin) for size in sizes], initial=slot.at)
        assert end <= slot.at + self.apart.slot_nbytes, f"{sum(sizes)} bytes for a slot"
        return places

    def _parts(self, keys: Sequence[BlockKey], sizes: Sequence[int] | None = None) -> Iterator[list[int]]:
        """Which records go together: as many as fit a call and a slot, each key once; records larger than a slot are
        left out."""
        self.apart.check()
        apart, give_up_s = self.apart, time.monotonic() + self.apart.settings.call_s
        part: dict[BlockKey, int] = {}
        left = apart.slot_nbytes
        for i, key in enumerate(keys):
            room = align(sizes[i] + apart.margin_nbytes) if sizes else 0
            if room > apart.slot_nbytes:
                continue
            if key in part or room > left or len(part) == KEYS_MAX:
                yield list(part.values())
                if time.monotonic() > give_up_s:
                    raise StorageError(f"{apart.url}: {apart.settings.call_s} s were over before all {len(keys)} keys")
                part, left = {}, apart.slot_nbytes
            part[key] = i
            left -= room
        if part:
            yield list(part.values())


__all__ = ["Apart", "ApartSettings", "ApartStore", "open_apart_store"]
