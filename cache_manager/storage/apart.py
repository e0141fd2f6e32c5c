"""A store in a process of its own: one that hangs, crashes or is killed costs an error, never a hang.

The process is killed *and reaped* before a caller hears that it is lost, so it touches no memory from then on. An
unanswered call may have been done or not; an answered one was done. A thread starts another process after a pause;
pauses grow until a call succeeds, and calls meanwhile fail at once.
"""

from __future__ import annotations

import logging
import mmap
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from typing import Any, Final

import msgspec

from cache_manager.child import Child, LostError
from cache_manager.errors import ConfigError, KVRouteError, StorageError, StoreClosedError, StoreUnavailableError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.record import Buffer, RecordHeader
from cache_manager.spec import align
from cache_manager.storage import apart_process
from cache_manager.storage.apart_process import ANSWERS, CALLS_MAX, encode
from cache_manager.storage.batch import flat
from cache_manager.storage.guard import ClosingStore, StoreLock
from cache_manager.storage.url import StoreUrl

logger = logging.getLogger(__name__)

KEYS_MAX: Final = 500
"""Keys of one call. ``CALLS_MAX`` such calls stay under 2048 transfers, which is what one peer of Mooncake bears."""


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
    limits = ApartSettings(call_s=url.seconds("call", 30.0) or 0, arena_nbytes=url.nbytes("arena", 64 << 20))
    return ApartStore(url.tiers[0], limits)


@dataclass(frozen=True, slots=True)
class Slot:
    """A process, a channel to it and its part of the arena, at ``at``, for one question at a time."""

    child: Child
    number: int
    at: int


class ApartStore(ClosingStore):
    """A ``StorageBackend`` and ``BoundedBackend``: the store at ``url`` ("" for none), in a process of its own.

    The constructor starts it, ``python -m module``: raises what opening the store raises, and :class:`StorageError` if
    no process can be started. ``opens`` is what the process opens, if that is not the URL. A call raises what the store
    raises, and :class:`StoreUnavailableError` when the process is lost, too slow or not there. A store that reports
    itself unavailable is opened anew in another process.
    """

    def __init__(
        self, url: str, settings: ApartSettings | None = None, module: str = apart_process.__name__, opens: str = ""
    ) -> None:
        self.settings = s = settings or ApartSettings()
        self.url = url
        self._module = module
        self._opens = opens or url
        self.record_nbytes_max = self._margin_nbytes = 0
        """The largest payload: as a slot of the arena or the store allows, whichever is less."""
        self._counts: Counter[str] = Counter()
        self._lock = threading.RLock()  # guards the counts; never held over a wait; a signal handler may ask meanwhile
        self._child: Child | None = None  # its store is open
        self._newest: Child | None = None  # its store may not be open yet
        self._cause = ""  # why there is no process
        self._pause_s = s.restart_pause_s
        self._closing = threading.Event()
        self._open = StoreLock(f"apart:{url}")
        self._slot_nbytes = align(-(-s.arena_nbytes // CALLS_MAX), 4096)
        self._arena_nbytes = CALLS_MAX * self._slot_nbytes
        self._free_slots: queue.LifoQueue[int] = queue.LifoQueue()  # the last one is in the processor's cache
        for number in range(CALLS_MAX - 1, -1, -1):
            self._free_slots.put(number)
        self._fd = os.memfd_create("kvroute-arena", os.MFD_CLOEXEC)
        opened = Future[None]()
        self._keeper = threading.Thread(target=self._keep, args=(opened,), name="kvroute-apart", daemon=True)
        try:
            os.ftruncate(self._fd, self._arena_nbytes)
            self._memory = memoryview(mmap.mmap(self._fd, self._arena_nbytes))
            self._keeper.start()
            opened.result(s.set_up_s + s.close_s)
        except BaseException as error:
            self._end("it was not opened")
            if self._keeper.ident is None:
                os.close(self._fd)
            if isinstance(error, OSError | RuntimeError | LostError):  # no memory or thread; no answer, or no end
                raise StorageError(f"{url}: no process can be started: {error}") from error
            raise

    @property
    def pid(self) -> int | None:
        """The current process's id; ``None`` while none takes calls."""
        child = self._child
        return None if child is None or child.cause else child.pid

    @property
    def counters(self) -> Mapping[str, int]:
        """Counts so far: ``lost_calls``, ``restarts``, ``bypassed`` (calls while there was no process), and the
        process's own."""
        with self._lock:
            return Counter(self._counts)

    def _check(self) -> Child:
        """The process that takes calls now; :class:`StoreUnavailableError` while there is none."""
        self._open.check()
        child = self._child
        if cause := self._cause if child is None else child.cause:
            self._count(bypassed=1)
            raise StoreUnavailableError(f"{self.url}: its process was lost, and is being replaced: {cause}")
        assert child is not None
        return child

    @contextmanager
    def slot(self) -> Iterator[Slot]:
        """A slot of the arena, for the ``with`` block. A process that was killed may write into its slots until it is
        gone: none is lent before that, and what is filled in for one process is given to no other."""
        self._check()  # before waiting for a slot
        with self._borrowed(self.settings.call_s + self.settings.close_s) as number:
            yield Slot(self._check(), number, number * self._slot_nbytes)

    @contextmanager
    def _borrowed(self, within_s: float) -> Iterator[int]:
        """A free slot, for the ``with`` block; :class:`StoreUnavailableError` if there is none ``within_s``.

        An exception from a signal handler, just when a slot was lent, may lose it until the store is opened anew.
        """
        try:
            number = self._free_slots.get(timeout=within_s)
        except queue.Empty:
            raise StoreUnavailableError(f"{self.url}: all slots of the arena stay taken: no call ends") from None
        try:
            yield number
        finally:
            self._free_slots.put(number)

    def call(self, slot: Slot, what: str, *takes: object, until_reaped: bool = False) -> Any:
        """Ask, with the slot's content, and wait: up to ``call_s``, then until a lost process is reaped.

        Raises what the store raised, :class:`StoreUnavailableError` when the process is lost or not there. With
        ``until_reaped`` that wait has no limit, so that nothing touches the memory that the call names.
        """
        child = slot.child
        try:
            gives = self._ask(child, slot.number, self.settings.call_s, what, *takes)
        except StoreUnavailableError as error:
            child.kill(str(error))
            self._count(lost_calls=1)
            if not child.gone.wait(None if until_reaped else self.settings.close_s):
                raise StoreUnavailableError(f"{self.url}: the process does not end") from error
            if self._closing.is_set():
                raise StoreClosedError(f"{self.url}: the store was closed meanwhile") from error
            raise StoreUnavailableError(f"{self.url}: the process was lost: {error}") from error
        self._pause_s = self.settings.restart_pause_s
        return gives

    def ask(self, what: str, *takes: object, until_reaped: bool = False) -> Any:
        """A :meth:`call` that has no records."""
        with self.slot() as slot:
            return self.call(slot, what, *takes, until_reaped=until_reaped)

    def _ask(self, child: Child, channel: int, within_s: float, what: str, *takes: object) -> Any:
        try:
            gives, failure, counts = ANSWERS[what].decode(child.ask(channel, encode((what, takes)), within_s))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise LostError(f"its message was no answer: {error}") from error
        self._count(**counts)
        if failure is not None:
            raise failure.error()
        return gives

    def _count(self, **by: int) -> None:
        with self._lock:
            self._counts.update(by)

    def close(self) -> None:
        """End the process; its store is closed first, if that takes at most ``close_s``. A call in flight may raise
        :class:`StoreClosedError`. Idempotent; does nothing in a forked child."""
        if not self._open.close():
            return
        self._closing.set()
        close_s = self.settings.close_s
        child = self._child
        failure: KVRouteError | None = None
        if child is not None:
            try:
                with self._borrowed(close_s) as number:
                    self._ask(child, number, close_s, "close")
            except KVRouteError as error:
                failure = error
        self._end("it was closed")
        self._keeper.join(close_s)
        if failure is not None:  # logged last: a logging handler may raise
            logger.warning("%s: the process did not close: %r", self.url, failure)

    def _end(self, cause: str) -> None:
        self._closing.set()
        if self._newest is not None:
            self._newest.kill(cause)

    def _keep(self, opened: Future[None]) -> None:
        """Run one process after another until this is closed; ``opened`` gets the result of the first one's start."""
        while not self._closing.is_set():
            try:
                cause = self._run(opened)
            except Exception as error:  # noqa: BLE001 (who waits for a process is told, and the next one is tried)
                if not opened.done():
                    opened.set_exception(error)
                    break
                cause = f"not started again: {error if isinstance(error, KVRouteError) else repr(error)}"
            self._cause = cause
            self._child = None
            if not self._closing.is_set():
                with suppress(Exception):  # of a logging handler: another process is started all the same
                    logger.error("%s: the process was lost: %s", self.url, cause)
            pause_s = self._pause_s
            self._pause_s = min(2 * self._pause_s, self.settings.restart_pause_max_s)
            self._closing.wait(pause_s)
        os.close(self._fd)

    def _run(self, opened: Future[None]) -> str:
        """One process, from its start until it is reaped; why it has ended."""
        try:
            child = self._newest = Child(self._module, CALLS_MAX, self._fd)
        except OSError as error:
            raise StorageError(f"{self.url}: no process can be started: {error}") from error
        try:
            if self._closing.is_set():  # close() may have seen only the process before
                raise StoreClosedError(f"{self.url}: the store was closed meanwhile")
            bound, self._margin_nbytes = self._ask(
                child, 0, self.settings.set_up_s, "open", self._opens, self._arena_nbytes
            )
            self.record_nbytes_max = min(self._slot_nbytes - self._margin_nbytes, bound)
            self._child = child
            if opened.done():
                self._count(restarts=1)
            else:
                opened.set_result(None)
        except KVRouteError as error:
            child.kill(str(error))
            raise
        finally:
            status = child.wait()
        return f"{child.cause or 'it has ended'} (status {status})"

    # ---------------------------------------------------------------- the store's calls

    def put(
        self, headers: Sequence[RecordHeader], payloads: Sequence[Buffer], *, replace: bool = False
    ) -> list[RecordHeader | None]:
        flats = [flat(*each) for each in zip(headers, payloads, strict=True)]
        memory = self._memory
        stored: dict[BlockKey, RecordHeader | None] = {}
        parts = 0
        for part, places in self._parts([header.key for header in headers], [payload.nbytes for payload in flats]):
            with self.slot() as slot:
                for i, place in zip(part, places, strict=True):
                    memory[slot.at + place :][: flats[i].nbytes] = flats[i]
                answer = self.call(slot, "put", [headers[i] for i in part], slot.at, places, replace)
            for i, each in zip(part, answer, strict=True):
                stored[headers[i].key] = headers[part[each]] if isinstance(each, int) else each
            parts += 1
        if parts > 1:  # a later part may have taken the room of an earlier part
            there = dict(zip(stored, self.contains(list(stored)), strict=True))
            stored = {key: header for key, header in stored.items() if there[key]}
        return [stored.get(header.key) for header in headers]

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[RecordHeader | Absence]:
        memory = self._memory
        found = list[RecordHeader | Absence]([Absence.MISS] * len(keys))
        for part, places in self._parts(keys, [buffer.nbytes for buffer in buffers]):
            sizes = [buffers[i].nbytes for i in part]
            with self.slot() as slot:
                answer = self.call(slot, "get", [keys[i] for i in part], slot.at, places, sizes)
                for i, place, each in zip(part, places, answer, strict=True):
                    found[i] = each
                    if isinstance(each, RecordHeader):
                        buffers[i].cast("B")[:] = memory[slot.at + place :][: buffers[i].nbytes]
        return found

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [each for part, _ in self._parts(keys) for each in self.ask("contains", [keys[i] for i in part])]

    def delete(self, keys: Sequence[BlockKey]) -> None:
        for part, _ in self._parts(keys):
            self.ask("delete", [keys[i] for i in part])

    def flush(self) -> None:
        self.ask("flush")

    def usage(self) -> Mapping[str, int]:
        usage: Mapping[str, int] = self.ask("usage")
        return usage

    def _parts(
        self, keys: Sequence[BlockKey], sizes: Sequence[int] | None = None
    ) -> Iterator[tuple[list[int], list[int]]]:
        """Which records go together, and the place of each in a slot: as many as fit a call and a slot, each key once;
        records larger than a slot are left out."""
        self._check()
        give_up_s = time.monotonic() + self.settings.call_s
        slot_nbytes = self._slot_nbytes
        part: dict[BlockKey, int] = {}
        places: list[int] = []
        end = 0
        for i, key in enumerate(keys):
            room = align(sizes[i] + self._margin_nbytes) if sizes else 0
            if room > slot_nbytes:
                continue
            if key in part or end + room > slot_nbytes or len(part) == KEYS_MAX:
                yield list(part.values()), places
                if time.monotonic() > give_up_s:
                    raise StorageError(f"{self.url}: {self.settings.call_s} s were over before all {len(keys)} keys")
                part = {}
                places = []
                end = 0
            part[key] = i
            places.append(end)
            end += room
        if part:
            yield list(part.values()), places


__all__ = ["ApartSettings", "ApartStore", "open_apart_store"]
