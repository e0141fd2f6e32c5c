"""The connection of a store: the native client of the moment, two breakers, and a thread that brings it back.

Locks: ``lock`` guards the breakers, the counts and which client is the current one; never held over a wait.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from concurrent.futures import Future
from typing import Final

from cache_manager.errors import StorageError, StoreUnavailableError
from cache_manager.storage.breaker import Breaker
from cache_manager.storage.mooncake import wire
from cache_manager.storage.mooncake.arena import Arena
from cache_manager.storage.mooncake.client import ClientLostError, NativeClient
from cache_manager.storage.mooncake.codes import describe, is_failure, is_master_failure
from cache_manager.storage.mooncake.master import check_ready, reach
from cache_manager.storage.mooncake.settings import MooncakeSettings, parse_address

PROBE_S: Final = 2.0
PROBE_NBYTES: Final = 64
CLOSE_S: Final = 2 * PROBE_S + 1.0
LOOK_S: Final = 0.25
"""How often the keeper looks whether there is something to do."""


class Link:
    """Native calls with a deadline; whatever goes wrong becomes a :class:`StorageError` and a breaker's business.

    Opening connects or raises. From then on a lost client, a dead master or a hung peer opens a breaker; the keeper
    connects a new client as soon as the master is well, and calls raise :class:`StoreUnavailableError` until then.
    """

    def __init__(self, settings: MooncakeSettings) -> None:
        self.settings = settings
        self.lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.reads, self.writes = (
            Breaker(settings.failures_max, settings.pause_ms / 1e3, settings.pause_max_ms / 1e3) for _ in range(2)
        )
        self.stopping = threading.Event()
        self.arena = Arena(settings.arena_nbytes)
        self._calls = threading.BoundedSemaphore(wire.CALLS_MAX)
        self._blame_s = settings.timeout_s / 4  # a call that had less did not show that the pool hangs
        self._client: NativeClient | None = None
        self._owner: NativeClient | None = None
        self._starting: NativeClient | None = None
        try:
            give_up_s = time.monotonic() + settings.connect_ms / 1e3
            if settings.segment_nbytes:
                self._owner = self._start(None, settings.segment_nbytes, give_up_s)
            self._client, code = self._connect(give_up_s)
        except BaseException:
            self._end(self._owner, wait_s=settings.close_ms / 1e3)
            self.arena.close()
            raise
        if is_failure(code):
            self.writes.failed(time.monotonic(), f"the first write was answered {describe(code)}", fatal=True)
        self._keeper = threading.Thread(target=self._keep, name="kvroute-mooncake-keeper", daemon=True)
        self._keeper.start()

    @property
    def native_pid(self) -> int:
        with self.lock:
            assert self._client is not None
            return self._client.pid

    def call(self, breaker: Breaker, request: wire.Request, offset: int | None, give_up_s: float) -> list[int]:
        """The codes of one native call. ``offset`` is the range of the arena that it uses.

        The range is the caller's again when this returns; when it raises, the range is given back as soon as native
        code cannot touch it any more.
        """
        try:
            client = self._admitted(breaker)
            if not self._calls.acquire(timeout=max(give_up_s - self._blame_s - time.monotonic(), 0)):
                raise StorageError(f"{wire.CALLS_MAX} Mooncake calls are running and none ended in time")
            if give_up_s - time.monotonic() < self._blame_s:
                self._calls.release()
                raise StorageError(f"no time is left of {self.settings.timeout_ms} ms for another Mooncake call")
        except StorageError:
            self._give(offset)
            raise
        future = client.submit(request)
        future.add_done_callback(lambda _: self._calls.release())
        try:
            codes = client.wait(future, max(give_up_s - time.monotonic(), 0))
        except TimeoutError:
            cause = f"{type(request).__name__} was not answered within {self.settings.timeout_ms} ms"
            self._lost(client, cause)
            self._count_lost()
            self._give_after(future, offset)
            raise StorageError(f"Mooncake: {cause}; a process of the pool hangs") from None
        except StorageError as error:
            if isinstance(error, ClientLostError):
                self._lost(client, str(error))
                self._count_lost()
            self._give_after(future, offset)
            raise
        assert len(codes) == len(getattr(request, "names", codes))
        self._judge(breaker, codes)
        return codes

    def close(self) -> None:
        """End the client, the owner and the keeper; every wait is bounded. No call is running, or its end is near."""
        self.stopping.set()
        with self.lock:
            starting = self._starting
        if starting is not None:
            starting.kill()
        self._keeper.join(CLOSE_S)
        wait_s = self.settings.close_ms / 1e3
        self._end(self._client, wait_s)
        self._end(self._owner, wait_s)
        if (self._client is None or self._client.gone) and not self.arena.taken_nbytes:
            self.arena.close()

    def _admitted(self, breaker: Breaker) -> NativeClient:
        with self.lock:
            if not breaker.closed or self._client is None:
                self.counts["bypassed"] += 1
                raise StoreUnavailableError(f"Mooncake at {self.settings.master} is not asked: {breaker.cause}")
            return self._client

    def _judge(self, breaker: Breaker, codes: list[int]) -> None:
        failures = [code for code in codes if is_failure(code)]
        master = [code for code in failures if is_master_failure(code)]
        now_s = time.monotonic()
        with self.lock:
            if master:
                for each in (self.reads, self.writes):
                    each.failed(now_s, describe(master[0]), fatal=True)
            elif failures and len(failures) == len(codes):
                breaker.failed(now_s, describe(failures[0]))
            elif not failures:
                breaker.succeeded()

    def _lost(self, client: NativeClient, cause: str) -> None:
        client.kill()
        now_s = time.monotonic()
        with self.lock:
            if client is self._client:
                for each in (self.reads, self.writes):
                    each.failed(now_s, cause, fatal=True)

    def _count_lost(self) -> None:
        with self.lock:
            self.counts["lost_calls"] += 1

    def _give(self, offset: int | None) -> None:
        if offset is not None:
            self.arena.give(offset)

    def _give_after(self, future: Future[list[int]], offset: int | None) -> None:
        future.add_done_callback(lambda _: self._give(offset))

    def _keep(self) -> None:
        """The keeper's loop: probe what is due, restart an owner that ended."""
        while not self.stopping.wait(LOOK_S):
            if self._client is not None and self._client.gone:
                self._lost(self._client, "the native client has ended")
            self._recover()
            if self._owner is not None and self._owner.gone:
                try:
                    owner = self._start(None, self.settings.segment_nbytes, time.monotonic() + PROBE_S)
                except StorageError:
                    with self.lock:
                        self.counts["owner_failures"] += 1
                    self.stopping.wait(self.settings.pause_ms / 1e3)
                else:
                    with self.lock:
                        if self.stopping.is_set():
                            owner.kill()
                        self._owner = owner
                        self.counts["owner_restarts"] += 1

    def _recover(self) -> None:
        now_s = time.monotonic()
        with self.lock:
            due = [breaker for breaker in (self.reads, self.writes) if breaker.due(now_s)]
            for breaker in due:
                breaker.begin_probe()
        if not due:
            return
        try:
            client, code = self._connect(now_s + self.settings.connect_ms / 1e3)
        except StorageError as error:
            with self.lock:
                for breaker in due:
                    breaker.end_probe(time.monotonic(), good=False, cause=str(error))
            return
        with self.lock:
            if self.stopping.is_set():
                client.kill()
                return
            old, self._client = self._client, client
            self.counts["rebuilds"] += 1
            for breaker in due:
                good = breaker is self.reads or not is_failure(code)
                breaker.end_probe(time.monotonic(), good=good, cause="" if good else describe(code))
        if old is not None:
            give_up_s = time.monotonic() + self.settings.timeout_s
            while old.in_flight and time.monotonic() < give_up_s and not self.stopping.wait(0.01):
                pass
            self._end(old, wait_s=1.0)

    def _connect(self, give_up_s: float) -> tuple[NativeClient, int]:
        """A client that has asked the master something and tried to put and get, and the code of that trial."""
        client = self._start(self.arena, 0, give_up_s)
        try:
            probe = f"{self.settings.prefix}/probe/{uuid.uuid4().hex}"
            code = client.call(wire.Exist([probe]), max(give_up_s - time.monotonic(), 0.1))[0]
            if code:
                raise StorageError(f"master {self.settings.master}: {describe(code)}; are its version and ours equal?")
            return client, self._warm_up(client, probe, give_up_s)
        except BaseException:
            client.kill()
            raise

    def _warm_up(self, client: NativeClient, name: str, give_up_s: float) -> int:
        offset = self.arena.take(PROBE_NBYTES, give_up_s)
        if offset is None:
            raise StorageError("the arena has no room for a probe")
        future = client.submit(wire.WarmUp(name, offset, PROBE_NBYTES))
        self._give_after(future, offset)
        wait_s = min(give_up_s - time.monotonic(), self.settings.timeout_s + PROBE_S)
        try:
            return client.wait(future, max(wait_s, 0.1))[0]
        except TimeoutError:
            raise StorageError(f"a first write was not answered within {wait_s:.1f} s") from None

    def _start(self, arena: Arena | None, segment_nbytes: int, give_up_s: float) -> NativeClient:
        """A set-up client; the master is asked first without the native library, which would wait for long."""
        s = self.settings
        local = reach(parse_address(s.master, "mooncake: master"), min(PROBE_S, s.connect_ms / 1e3))
        check_ready(s.admin_address, PROBE_S)
        with self.lock:
            if self.stopping.is_set():
                raise StorageError("the store is being closed")
            client = self._starting = NativeClient(arena, s.timeout_ms, s.log)
        try:
            client.set_up(
                master=s.master,
                host=s.host or local,
                protocol=s.protocol,
                devices=s.devices,
                segment_nbytes=segment_nbytes,
                wait_s=max(give_up_s - time.monotonic(), 0.1),
            )
        finally:
            with self.lock:
                self._starting = None
        return client

    def _end(self, client: NativeClient | None, wait_s: float) -> None:
        if client is not None:
            client.close(wait_s)
