"""The engine's end of the cache-transfer process: started, watched, restarted, and asked with deadlines."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, Self

import msgspec

from cache_manager.errors import (
    BlockStateError,
    ConfigError,
    StorageError,
    TransferProcessError,
    TransferProcessFullError,
)
from cache_manager.framing import receive_frame, send_frame
from cache_manager.ports import HitPolicy
from cache_manager.regions import SharedRegion
from cache_manager.storage.breaker import Breaker
from cache_manager.transfer_manager import commands
from cache_manager.transfer_manager.commands import Answer, Asked

logger = logging.getLogger(__name__)

LOOK_S: Final = 0.1
"""How often the watcher looks at deadlines and at the clock of a restart."""

FRAME_S_MAX: Final = 5
"""The process reads its socket at once, and ends a frame that it has begun; one that does not is stopped."""


@dataclass(frozen=True, slots=True)
class SharedPart:
    """One kind of record of every block: rows, or KV. All parts have the same blocks.

    ``store`` is the URL of a store that the process opens for itself: a file store is written by it alone.
    """

    name: str
    device: SharedRegion
    host: SharedRegion | None = None
    store: str = ""


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """Limits. A command that takes longer than ``command_s`` ends the process, and with it every command in flight."""

    command_s: float = 30.0
    set_up_s: float = 60.0
    close_s: float = 10.0
    commands_max: int = 64
    restart_pause_s: float = 0.1
    restart_pause_max_s: float = 10.0

    def __post_init__(self) -> None:
        for field in ("command_s", "set_up_s", "close_s", "restart_pause_s", "restart_pause_max_s"):
            if not getattr(self, field) > 0:
                raise ConfigError(field, "seconds, more than 0", getattr(self, field))
        if self.commands_max < 1:
            raise ConfigError("commands_max", "1 or more", self.commands_max)


@dataclass(frozen=True, slots=True)
class TransferCounters:
    """What happened since the start; every number only grows. Commands in flight are those that have not ended."""

    commands: int = 0
    commands_done: int = 0
    commands_failed: int = 0
    commands_lost: int = 0
    commands_refused: int = 0
    starts: int = 0
    start_failures: int = 0


class CacheTransferManager:
    """Swaps, persists and restores every part of blocks in a process of its own, by block ids.

    :meth:`submit` never waits for the process. A command's future ends with its answer; with :class:`StorageError` when
    a store failed; with :class:`TransferProcessError` when the process failed it, ended or was too slow, and then the
    process is gone *and reaped*, so that nothing touches the blocks any more. Only what the caller then declares
    readable is readable: a command that failed has changed nothing.

    A process that ended is started again, at once and then with growing pauses; the regions stay, as they are the
    engine's. Safe from several threads. Opening starts the process and raises :class:`TransferProcessError` when it
    cannot be set up.
    """

    def __init__(
        self,
        parts: Sequence[SharedPart],
        settings: TransferSettings | None = None,
        *,
        policy: HitPolicy = "gate",
        required: Sequence[int] = (0,),
    ) -> None:
        self.settings = settings or TransferSettings()
        self._setup = _setup_of(parts, policy, required)
        self._lock = threading.Lock()  # the counts, the process of the moment and what it was asked
        self._counts = dict.fromkeys(TransferCounters.__dataclass_fields__, 0)
        s = self.settings
        self._breaker = Breaker(1, s.restart_pause_s, s.restart_pause_max_s)
        self._stopping, self._up = threading.Event(), threading.Event()
        self._pid = os.getpid()
        self._worker: _Worker | None = None
        worker = _Worker()
        try:
            self._begin(worker)
        except BaseException:
            worker.end()
            raise
        self._worker = worker
        self._up.set()
        self._watcher = threading.Thread(target=self._watch, name="kvroute-cache-transfer", daemon=True)
        self._watcher.start()

    @property
    def counters(self) -> TransferCounters:
        with self._lock:
            return TransferCounters(**self._counts)

    @property
    def pid(self) -> int | None:
        """The process of the moment; ``None`` while there is none."""
        with self._lock:
            return None if self._worker is None else self._worker.pid

    @property
    def running(self) -> bool:
        """Whether commands are taken now."""
        return self._up.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until commands are taken; ``False`` when ``timeout_s`` was over before."""
        return self._up.wait(timeout_s)

    @property
    def in_flight(self) -> int:
        with self._lock:
            return 0 if self._worker is None else len(self._worker.waiting)

    def submit(self, command: commands.Command) -> Future[Answer]:
        """Ask.

        Raises :class:`TransferProcessFullError` at ``commands_max``, :class:`TransferProcessError` while there is no
        process.
        """
        if os.getpid() != self._pid:
            raise BlockStateError("cache-transfer process", "the process that started it", f"a fork, {os.getpid()}")
        with self._lock:
            worker = self._worker
            if worker is None or not self._breaker.closed or self._stopping.is_set():
                self._counts["commands_refused"] += 1
                cause = "it was closed" if self._stopping.is_set() else self._breaker.cause
                raise TransferProcessError(f"the cache-transfer process is not running: {cause}")
            if len(worker.waiting) >= self.settings.commands_max:
                self._counts["commands_refused"] += 1
                raise TransferProcessFullError(f"{self.settings.commands_max} commands are in flight")
            number, future = self._expect(worker, self.settings.command_s)
        try:
            worker.send(number, command)
        except (AssertionError, TypeError, ValueError, OverflowError):  # no message, or too large for one: not sent
            with self._lock:
                worker.take(number)
            raise
        return future

    def call(self, command: commands.Command) -> Answer:
        """:meth:`submit` and wait; bounded by ``command_s`` and the end of the process."""
        return self.submit(command).result()

    def close(self) -> None:
        """End the process: properly within ``close_s``, by force after. Commands in flight end first. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        with self._lock:
            worker = self._worker
            number, future = self._expect(worker, self.settings.close_s) if worker else (0, None)
        if worker is not None and future is not None:
            worker.send(number, commands.Close())
            try:
                future.result(self.settings.close_s)
            except (TransferProcessError, StorageError, TimeoutError) as error:
                logger.warning("the cache-transfer process did not close: %s", error)
                worker.kill()
            self._watcher.join(self.settings.close_s)
            worker.kill()  # should it have answered and not ended
        self._watcher.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _expect(self, worker: _Worker, within_s: float) -> tuple[int, Future[Answer]]:
        """The lock is held."""
        self._counts["commands"] += 1
        return worker.expect(time.monotonic() + within_s)

    # ---------------------------------------------------------------- the watcher's thread

    def _begin(self, worker: _Worker) -> None:
        """Set ``worker`` up, or raise :class:`TransferProcessError`."""
        with self._lock:
            number, future = self._expect(worker, self.settings.set_up_s)
        worker.send(number, self._setup)
        while not future.done():
            if self._stopping.is_set() or not self._listen(worker):
                self._lose(worker, "it ended during set-up")
        try:
            future.result(0)
        except StorageError as error:
            raise TransferProcessError(f"the cache-transfer process cannot open its store: {error}") from error
        with self._lock:
            self._counts["starts"] += 1

    def _watch(self) -> None:
        while True:
            with self._lock:
                worker = self._worker
            if worker is None:
                if self._stopping.wait(LOOK_S):
                    return
                self._restart()
            elif not self._listen(worker):
                self._lose(worker, "it has ended")
                if self._stopping.is_set():
                    return

    def _listen(self, worker: _Worker) -> bool:
        """Take one answer, if one comes; ``False`` when the process is gone or must go."""
        if worker.readable(LOOK_S):
            answer = worker.receive()
            if answer is None:
                return False
            with self._lock:
                future = worker.take(answer.number)
                if future is None:
                    return False
                self._counts["commands_failed" if answer.error else "commands_done"] += 1
                if not answer.error:
                    self._breaker.succeeded()
            _end(future, answer)
        with self._lock:
            overdue = worker.overdue(time.monotonic())
        if overdue:
            logger.error("the cache-transfer process did not answer in time; it is ended")
        return not overdue

    def _lose(self, worker: _Worker, cause: str) -> None:
        """The process is ended and reaped, and then what it was asked has failed."""
        status = worker.end()
        with self._lock:
            self._worker = None
            self._up.clear()
            lost = worker.take_all()
            self._counts["commands_lost"] += len(lost)
            if not self._stopping.is_set() and self._breaker.closed:
                self._breaker.failed(time.monotonic(), f"{cause} (status {status})", fatal=True)
        if lost:
            logger.error("the cache-transfer process was lost (status %s) with %d commands", status, len(lost))
        for future in lost:
            future.set_exception(TransferProcessError(f"the cache-transfer process was lost: {cause} ({status})"))

    def _restart(self) -> None:
        with self._lock:
            if not self._breaker.due(time.monotonic()):
                return
            self._breaker.begin_probe()
        worker = None
        try:
            worker = _Worker()
            self._begin(worker)
        except (TransferProcessError, OSError) as error:  # OSError: the machine has no process or descriptor left
            if worker is not None:
                worker.end()
            with self._lock:
                self._counts["start_failures"] += 1
                self._breaker.end_probe(time.monotonic(), good=False, cause=str(error))
            return
        with self._lock:
            self._breaker.end_probe(time.monotonic(), good=True)
            if not self._stopping.is_set():  # else close() has not seen this worker, and waits
                self._worker = worker
                self._up.set()
                return
        worker.end()


class _Worker:
    """One process, its socket, and the futures of what it was asked. The manager's lock guards the futures."""

    def __init__(self) -> None:
        self.waiting: dict[int, tuple[float, Future[Answer]]] = {}
        self._number = 0
        self._sending = threading.Lock()
        self._end, theirs = socket.socketpair()
        for direction in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            self._end.setsockopt(socket.SOL_SOCKET, direction, struct.pack("ll", FRAME_S_MAX, 0))
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(self._end.close)
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-P", "-m", "cache_manager.transfer_manager.process", str(theirs.fileno())],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C is the engine's to handle
            )
            undo.pop_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    def expect(self, deadline_s: float) -> tuple[int, Future[Answer]]:
        self._number += 1
        future: Future[Answer] = Future()
        future.set_running_or_notify_cancel()  # it cannot be cancelled: the process is at work
        self.waiting[self._number] = deadline_s, future
        return self._number, future

    def take(self, number: int) -> Future[Answer] | None:
        """``None``: nothing was asked under that number, or it was answered before."""
        _, future = self.waiting.pop(number, (0.0, None))
        return future

    def take_all(self) -> list[Future[Answer]]:
        lost = [future for _, future in self.waiting.values()]
        self.waiting.clear()
        return lost

    def overdue(self, now_s: float) -> bool:
        return any(deadline_s <= now_s for deadline_s, _ in self.waiting.values())

    def send(self, number: int, command: commands.Command) -> None:
        try:
            with self._sending:
                send_frame(self._end, commands.encode(Asked(number, command)))
        except OSError:
            self.kill()  # half a frame may be out; the watcher ends the future

    def readable(self, wait_s: float) -> bool:
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        return bool(poll.poll(wait_s * 1e3))

    def receive(self) -> Answer | None:
        """An answer; ``None`` when the process is gone, stopped within one, or says what is none."""
        try:
            body = receive_frame(self._end)
            return None if body is None else commands.decode_answer(body)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> int:
        """Kill and reap; from here on nothing of it touches the regions. Its exit status."""
        self._process.kill()
        status = self._process.wait()
        with self._sending:
            self._end.close()
        return status


def _end(future: Future[Answer], answer: Answer) -> None:
    if not answer.error:
        future.set_result(answer)
    elif answer.of_store:
        future.set_exception(StorageError(answer.error))
    else:
        future.set_exception(TransferProcessError(answer.error))


def _setup_of(parts: Sequence[SharedPart], policy: HitPolicy, required: Sequence[int]) -> commands.SetUp:
    if not parts:
        raise ConfigError("parts", "at least one", "none")
    first = parts[0]
    for part in parts:
        for tier in ("device", "host"):
            region, wanted = getattr(part, tier), getattr(first, tier)
            if (region is None) != (wanted is None) or (region is not None and region.blocks != wanted.blocks):
                got = "none" if region is None else region.blocks
                raise ConfigError(
                    f"part {part.name}: {tier} blocks", f"{wanted.blocks if wanted else 'none'}, as {first.name}", got
                )
        if bool(part.store) != bool(first.store):
            raise ConfigError(f"part {part.name}: store", "one for every part, or none", repr(part.store))
    return commands.SetUp(
        [
            commands.PartSetUp(
                part.name,
                [spec.to_json() for spec in part.device.layout.specs],
                part.device.name,
                part.host.name if part.host else "",
                part.store,
            )
            for part in parts
        ],
        policy,
        list(required),
    )


__all__ = ["CacheTransferManager", "SharedPart", "TransferCounters", "TransferSettings"]
