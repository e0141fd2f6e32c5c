"""The engine's end of the cache-transfer process: started, watched, restarted, and asked with deadlines."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from cache_manager.child import LOOK_S, AskedChild, Child
from cache_manager.errors import (
    BlockStateError,
    ConfigError,
    StorageError,
    StoreUnavailableError,
    TransferProcessError,
)
from cache_manager.keys import BlockKey
from cache_manager.memory import GENERATION_SHIFT
from cache_manager.mover import one_each
from cache_manager.ports import Absence, BlockRecords, Found, HitPolicy, RecordCounters, Region, TierName
from cache_manager.regions import SharedRegion
from cache_manager.storage.breaker import Breaker
from cache_manager.table import Ints
from cache_manager.transfer_manager import commands
from cache_manager.transfer_manager.commands import Answer, Command

logger = logging.getLogger(__name__)

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

    def check_beside(self, rows: SharedPart) -> Self:
        """Raise :class:`ConfigError` unless it has the blocks of ``rows``, and a store if they have one."""
        for tier in ("device", "host"):
            regions: list[SharedRegion | None] = [getattr(rows, tier), getattr(self, tier)]
            wanted, got = ("none" if each is None else each.blocks for each in regions)
            if got != wanted:
                raise ConfigError(f"part {self.name}: {tier} blocks", f"{wanted}, as {rows.name}", got)
        if bool(self.store) != bool(rows.store):
            raise ConfigError(f"part {self.name}: store", "one for every part, or none", repr(self.store))
        return self

    def set_up(self) -> commands.PartSetUp:
        """What the process is told of it."""
        specs = [spec.to_json() for spec in self.device.layout.specs]
        host = "" if self.host is None else self.host.name
        return commands.PartSetUp(specs, self.device.name, host, self.store)


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """Limits. A command that takes longer than ``command_s`` ends the process, and with it every command in flight."""

    command_s: float = 30.0
    set_up_s: float = 60.0
    close_s: float = 10.0
    restart_pause_s: float = 0.1
    restart_pause_max_s: float = 10.0

    def __post_init__(self) -> None:
        for field in ("command_s", "set_up_s", "close_s", "restart_pause_s", "restart_pause_max_s"):
            if not getattr(self, field) > 0:
                raise ConfigError(field, "seconds, more than 0", getattr(self, field))


class CacheTransferManager:
    """The :class:`Mover` that swaps, persists and restores every part of blocks in a process of its own.

    ``AuxBlocks(..., memory="shared", mover=manager.start)`` starts the process for its regions of the rows, which are
    moved together with those of ``kv``, if there are any; :meth:`close` ends it, after the ``AuxBlocks``. ``store`` is
    the URL of the rows' store, if there is one; ``policy`` and ``required`` (indices of the rows' specs, all if not
    given) are the law of pairs, which the process keeps.

    A command ends with its answer; with :class:`StorageError` when a store failed; with :class:`TransferProcessError`
    when the process failed it, ended or was too slow, and then the process is gone *and reaped*, so that nothing
    touches the blocks any more. Only what the caller then declares readable is readable: a command that failed has
    changed nothing. As a mover, a process that is lost fails moves with :class:`TransferProcessError`, and persists and
    restores with :class:`StoreUnavailableError`.

    A process that ended is started again, at once and then with growing pauses; the regions stay, as they are the
    engine's. Safe from several threads.
    """

    def __init__(
        self,
        kv: SharedPart | None = None,
        *,
        store: str = "",
        policy: HitPolicy = "gate",
        required: Sequence[int] = (),
        settings: TransferSettings | None = None,
    ) -> None:
        self.settings = s = settings or TransferSettings()
        self._kv, self._store, self._policy, self._required = kv, store, policy, required
        self._records = RecordCounters()  # of the rows' store, as the process told last
        self._changed = threading.Condition()  # guards the breaker, and the next two
        self._worker: _Worker | None = None  # the process of the moment
        self._stopping = False
        self._breaker = Breaker(1, s.restart_pause_s, s.restart_pause_max_s)
        self._starter: threading.Thread | None = None

    def start(self, device: Region, host: Region | None = None) -> Self:
        """Start the process for these regions of the rows, which have to be shared ones.

        Raises :class:`ConfigError` for others, or where the KV's are of other blocks, :class:`TransferProcessError`
        when the process cannot be set up, and :class:`BlockStateError` when it was started: it moves the blocks of one.
        """
        if self._starter is not None:
            raise BlockStateError("cache-transfer process", "one that was not started", "that of other blocks")
        if not isinstance(device, SharedRegion) or not isinstance(host, SharedRegion | None):
            raise ConfigError("memory", "'shared', to be seen by the cache-transfer process", "'heap'")
        rows = SharedPart("rows", device, host, self._store)
        parts = [rows] if self._kv is None else [rows, self._kv.check_beside(rows)]
        self._regions: dict[TierName, SharedRegion | None] = {"device": device, "host": host}
        required = list(self._required) or list(range(len(device.layout.specs)))
        self._setup = commands.SetUp([part.set_up() for part in parts], self._policy, required)
        self._pid = os.getpid()
        self._start()
        starter = threading.Thread(target=self._keep, name="kvroute-cache-transfer-starter", daemon=True)
        try:
            starter.start()
        except RuntimeError as error:
            self.close()
            raise TransferProcessError(f"the cache-transfer process has nobody to watch it: {error}") from error
        self._starter = starter
        return self

    # ---------------------------------------------------------------- a mover

    @property
    def stores(self) -> bool:
        return bool(self._store)

    @property
    def counters(self) -> RecordCounters:
        return self._records

    def copy(self, source: TierName, target: TierName, sources: Ints, targets: Ints) -> None:
        """Copy every part of blocks, in the generations that the targets are in now."""
        wanted = self._generations(target, targets.tolist())
        self.call(commands.Move(source, target, sources.tolist(), targets.tolist(), wanted))

    def put(self, records: BlockRecords, *, replace: bool = False) -> list[Found | None]:
        assert not replace, "the process itself knows when a pair is to be replaced"
        return one_each(self._ask(commands.Persist(records)).stored, records.keys)

    def get_into(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> list[Found | Absence]:
        asked = commands.Restore(list(keys), list(blocks), self._generations("device", blocks))
        restored = one_each(self._ask(asked).restored, keys)
        return [Absence(each) if isinstance(each, str) else each for each in restored]

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return one_each(self._ask(commands.Contains(list(keys))).there, keys)

    def flush(self) -> None:
        self._ask(commands.Flush())

    def _ask(self, command: Command) -> Answer:
        try:
            answer = self.call(command)
        except TransferProcessError as error:
            raise StoreUnavailableError(str(error)) from error
        self._records = RecordCounters(*answer.counters)
        return answer

    def _generations(self, tier: TierName, blocks: Sequence[int]) -> list[int]:
        region = self._regions[tier]
        assert region is not None, f"{tier}: a tier that there is"
        found: list[int] = (region.words[list(blocks)] >> np.uint64(GENERATION_SHIFT)).tolist()
        return found

    # ---------------------------------------------------------------- a process

    @property
    def pid(self) -> int | None:
        """The process of the moment; ``None`` while there is none."""
        worker = self._worker
        return None if worker is None else worker.pid

    @property
    def running(self) -> bool:
        """Whether commands are taken now."""
        return self._worker is not None

    def wait(self, timeout_s: float) -> bool:
        """Wait until commands are taken; ``False`` when ``timeout_s`` was over before."""
        with self._changed:
            return self._changed.wait_for(lambda: self.running, timeout_s)

    def call(self, command: Command) -> Answer:
        """Ask and wait; bounded by ``command_s`` and the end of the process.

        Raises :class:`TransferProcessError` while there is no process.
        """
        self._check_no_fork()
        with self._changed:
            worker = self._worker
            if worker is None or self._stopping:
                cause = "it was closed" if self._stopping else self._breaker.cause or "it was not started"
                raise TransferProcessError(f"the cache-transfer process is not running: {cause}")
        answer = worker.wait(worker.submit(command, self.settings.command_s))
        with self._changed:
            self._breaker.succeeded()
        return answer

    def close(self) -> None:
        """End the process: properly within ``close_s``, by force after. Commands in flight end first. Idempotent.

        Raises :class:`BlockStateError` in a forked child, whose parent's process it is.
        """
        self._check_no_fork()
        with self._changed:
            if self._stopping:
                return
            self._stopping = True
            self._changed.notify_all()
        if self._starter is not None:
            self._starter.join()
        worker = self._worker
        if worker is None:
            return
        try:
            worker.wait(worker.submit(commands.Close(), self.settings.close_s))
        except (TransferProcessError, StorageError) as error:
            logger.warning("the cache-transfer process did not close: %s", error)
        if not worker.join(self.settings.close_s):  # should it have answered and not ended
            worker.kill()
            worker.join()

    def _check_no_fork(self) -> None:
        if self._starter is not None and os.getpid() != self._pid:
            raise BlockStateError("cache-transfer process", "the process that started it", f"a fork, {os.getpid()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------- starting it, and what it tells

    def _start(self) -> None:
        """Start a process and set it up, or raise :class:`TransferProcessError`; ``OSError`` when there is no room."""
        worker = _Worker(self)
        future = worker.submit(self._setup, self.settings.set_up_s)
        try:
            while not future.done() and not self._stopping:
                with contextlib.suppress(TimeoutError):
                    worker.wait(future, LOOK_S)
            future.result(0)
            with self._changed:
                if worker.gone:
                    raise TransferProcessError("the cache-transfer process ended when it was set up")
                if self._stopping:  # close() has found no process
                    raise TransferProcessError("the cache-transfer process is being closed")
                if not self._breaker.closed:
                    self._breaker.end_probe(time.monotonic(), good=True)
                self._worker = worker
                self._changed.notify_all()
        except BaseException as error:
            worker.kill()
            worker.join()
            if isinstance(error, StorageError):
                raise TransferProcessError(f"the cache-transfer process cannot open its store: {error}") from error
            if isinstance(error, TimeoutError):
                raise TransferProcessError("the cache-transfer process is being closed") from None
            raise

    def _keep(self) -> None:
        """The starter's loop: when the process is gone and its pause is over, start another."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or not self.running)
                pause_s = max(self._breaker.until - time.monotonic(), 0)
                if self._changed.wait_for(lambda: self._stopping, pause_s):
                    return
                self._breaker.begin_probe()
            try:
                self._start()
            except (TransferProcessError, OSError) as error:  # OSError: no process, thread or descriptor left
                logger.warning("the cache-transfer process was not started again: %s", error)
                with self._changed:
                    self._breaker.end_probe(time.monotonic(), good=False, cause=str(error))

    def _gone(self, worker: _Worker, cause: str) -> None:
        """The process is ended and reaped; what it was asked fails after this."""
        with self._changed:
            if worker is self._worker:
                self._worker = None
                self._changed.notify_all()
                if not self._stopping:
                    self._breaker.failed(time.monotonic(), cause, fatal=True)


class _Worker(AskedChild[Answer]):
    """One process of a manager."""

    def __init__(self, manager: CacheTransferManager) -> None:
        self._manager = manager
        child = Child("cache_manager.transfer_manager.process", inherit=True, frame_s=FRAME_S_MAX)
        super().__init__(child, "kvroute-cache-transfer")

    def submit(self, command: Command, within_s: float) -> Future[Answer]:
        return self.ask(lambda number: commands.encode(commands.Asked(number, command)), within_s)

    def _decoded(self, body: bytes) -> tuple[int, Answer | Exception]:
        answer = commands.decode_answer(body)
        if not answer.error:
            return answer.number, answer
        return answer.number, (StorageError if answer.of_store else TransferProcessError)(answer.error)

    def _ended(self, cause: str, lost: int) -> None:
        self._manager._gone(self, cause)
        if lost:
            logger.error("the cache-transfer process was lost with %d commands: %s", lost, cause)

    def _lost(self, cause: str) -> Exception:
        return TransferProcessError(f"the cache-transfer process was lost: {cause}")
