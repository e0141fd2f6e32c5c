"""A store in a process of its own: one that hangs, crashes or is killed costs an error, never a hang.

The process is killed *and reaped* before anybody hears that it is lost, so nothing of it touches memory from then on. A
call that it was asked may have been done or not; one that was answered was. The next call after a pause starts another
process; pauses grow until a call succeeds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from typing import Any

from cache_manager import errors
from cache_manager.child import AskedChild, Child
from cache_manager.errors import ConfigError, KVRouteError, StorageError, StoreUnavailableError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.record import Buffer, RecordHeader
from cache_manager.spec import align
from cache_manager.storage import apart_process as ask
from cache_manager.storage.apart_process import Answer
from cache_manager.storage.arena import Arena, Ranges
from cache_manager.storage.batch import chunks, flat
from cache_manager.storage.guard import ClosingStore, OpenCheck
from cache_manager.storage.url import StoreUrl

logger = logging.getLogger(__name__)

KEYS_MAX = 4096
"""Of one message."""


@dataclass(frozen=True, slots=True)
class ApartSettings:
    """Limits. A call that takes longer than ``call_s`` ends the process, and with it every call in flight."""

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


class Apart:
    """The process of the moment, ``python -m module``, with the store at ``url`` ("" for none). Any thread asks.

    It is started here: raises what opening the store raises, and :class:`StorageError` where no process can be.
    """

    def __init__(self, url: str, settings: ApartSettings | None = None, module: str = ask.__name__) -> None:
        self.settings = s = settings or ApartSettings()
        self.url, self.module = url, module
        self.arena = Arena(s.arena_nbytes)
        self.record_nbytes_max = 0
        self._lock = threading.Lock()  # guards the worker and the pause; never held over a wait
        self._starting = threading.Lock()  # of whoever looks for a process, and starts one
        self._worker: _Worker | None = None
        self._pause_s, self._not_before_s, self._cause = s.restart_pause_s, 0.0, ""
        self.guard = OpenCheck(f"apart:{url}", self._lock)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int | None:
        """The process of the moment; ``None`` while there is none."""
        worker = self._worker
        return None if worker is None or worker.gone else worker.pid

    def call(self, command: ask.Command, lent: Ranges | None = None, *, reaped: bool = False) -> Answer:
        """Ask, with the memory ``lent``, and wait: ``call_s``, and until a process that is lost is reaped.

        Raises what the store raised, :class:`StoreUnavailableError` when the process is lost or not there. With
        ``reaped`` it waits as long as it takes, so that nothing touches what the command names.
        """
        self.guard.check()
        future = self._running().begin(command, self.settings.call_s)
        if lent is not None:
            lent.call = future
        try:
            answer = future.result(None if reaped else self.settings.call_s + self.settings.close_s)
        except TimeoutError:  # it was killed long ago; the kernel keeps it, in a call that does not end
            raise StoreUnavailableError(f"{self.url}: the process does not end") from None
        self._pause_s = self.settings.restart_pause_s
        return answer

    def close(self) -> None:
        """End the process: properly within ``close_s``, by force after. Idempotent; nothing in a forked child."""
        if not self.guard.close():
            return
        with self._lock:
            worker = self._worker
        if worker is not None and not worker.gone:
            try:
                worker.begin(ask.Close(), self.settings.close_s).result()
            except KVRouteError as error:
                logger.warning("%s: the process did not close: %s", self.url, error)
            if not worker.join(self.settings.close_s):  # should it have answered and not ended
                worker.kill()
                worker.join(self.settings.close_s)
        self.arena.close()

    def ready(self) -> bool:
        """Whether a process takes calls, started now if it was time for one; :class:`StoreUnavailableError` if not."""
        return not self._running().gone

    def _running(self) -> _Worker:
        with self._starting:
            worker = self._worker
            if worker is not None and not worker.gone:
                return worker
            if time.monotonic() < self._not_before_s:
                raise StoreUnavailableError(f"{self.url}: its process was lost a moment ago: {self._cause}")
            try:
                return self._start()
            except KVRouteError as error:
                self.guard.check()
                raise StoreUnavailableError(f"{self.url}: not started again: {error}") from error

    def _start(self) -> _Worker:
        """Held: _starting, but by the constructor."""
        try:
            worker = _Worker(self)
        except OSError as error:  # no process, thread or descriptor is left
            self.lost(str(error))
            raise StorageError(f"{self.url}: no process can be started: {error}") from error
        with self._lock:
            self._worker = worker  # close() finds it, whatever it has come to
        try:
            self.guard.check()
            opened = worker.begin(ask.Open(self.url, self.arena.nbytes), self.settings.set_up_s).result()
        except BaseException:
            worker.kill()
            worker.join(self.settings.close_s)
            raise
        self.record_nbytes_max = min(self.arena.slot_nbytes, opened.usage["record_nbytes_max"])
        return worker

    def lost(self, cause: str) -> None:
        """A process has ended, or was not to be had."""
        with self._lock:
            self._cause, self._not_before_s = cause, time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, self.settings.restart_pause_max_s)


class _Worker(AskedChild[Answer]):
    """One process of an :class:`Apart`."""

    def __init__(self, apart: Apart) -> None:
        self._apart = apart
        super().__init__(Child(apart.module, apart.arena.fd, inherit=True), "kvroute-apart")

    def begin(self, command: ask.Command, within_s: float) -> Future[Answer]:
        return self.ask(lambda number: ask.encode(ask.Asked(number, command)), within_s)

    def _decoded(self, body: bytes) -> tuple[int, Answer | Exception]:
        answer = ask.decode_answer(body)
        return answer.number, answer if answer.failure is None else _error_of(answer.failure)

    def _ended(self, cause: str, lost: int) -> None:
        self._apart.lost(cause)
        if lost:
            logger.error("%s: the process was lost with %d calls: %s", self._apart.url, lost, cause)

    def _lost(self, cause: str) -> Exception:
        return StoreUnavailableError(f"{self._apart.url}: the process was lost: {cause}")


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

    def put(
        self, headers: Sequence[RecordHeader], payloads: Sequence[Buffer], *, replace: bool = False
    ) -> list[RecordHeader | None]:
        apart, arena = self.apart, self.apart.arena
        records = [(header, flat(header, payload)) for header, payload in zip(headers, payloads, strict=True)]
        stored: dict[BlockKey, RecordHeader | None] = {}
        fit = [each for each in records if align(each[1].nbytes) <= arena.slot_nbytes]
        parts = list(chunks(fit, lambda each: align(each[1].nbytes), arena.slot_nbytes, KEYS_MAX))
        for part in parts:
            with arena.lend([payload.nbytes for _, payload in part], self._give_up_s) as lent:
                for (_, payload), at in zip(part, lent.offsets, strict=True):
                    arena.view[at : at + payload.nbytes] = payload
                offered = [header for header, _ in part]
                answer = apart.call(ask.Put(offered, lent.offsets, replace), lent)
            for header, each in zip(offered, answer.stored, strict=True):
                stored[header.key] = offered[each] if isinstance(each, int) else each
        if len(parts) > 1:  # a later part may have taken the room of an earlier one's
            there = dict(zip(stored, self.contains(list(stored)), strict=True))
            stored = {key: header for key, header in stored.items() if there[key]}
        return [stored.get(header.key) for header in headers]

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[RecordHeader | Absence]:
        arena, found = self.apart.arena, [Absence.MISS for _ in keys]
        answers: list[RecordHeader | Absence] = list(found)
        fit = [i for i, buffer in enumerate(buffers) if align(buffer.nbytes) <= arena.slot_nbytes]
        for part in chunks(fit, lambda i: align(buffers[i].nbytes), arena.slot_nbytes, KEYS_MAX):
            with arena.lend([buffers[i].nbytes for i in part], self._give_up_s) as lent:
                answer = self.apart.call(ask.Get([keys[i] for i in part], lent.offsets, lent.nbytes), lent)
                for i, at, each in zip(part, lent.offsets, answer.found, strict=True):
                    answers[i] = each
                    if isinstance(each, RecordHeader):
                        buffers[i].cast("B")[:] = arena.view[at : at + buffers[i].nbytes]
        return answers

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        parts = list(chunks(keys, lambda _: 1, KEYS_MAX)) or [[]]
        return [each for part in parts for each in self.apart.call(ask.Contains(part)).there]

    def delete(self, keys: Sequence[BlockKey]) -> None:
        for part in list(chunks(keys, lambda _: 1, KEYS_MAX)) or [[]]:
            self.apart.call(ask.Delete(part))

    def flush(self) -> None:
        self.apart.call(ask.Flush())

    def usage(self) -> Mapping[str, int]:
        return self.apart.call(ask.Usage()).usage

    def close(self) -> None:
        self.apart.close()

    @property
    def _give_up_s(self) -> float:
        self.apart.guard.check()
        return time.monotonic() + self.apart.settings.call_s


__all__ = ["Apart", "ApartSettings", "ApartStore", "open_apart_store"]
