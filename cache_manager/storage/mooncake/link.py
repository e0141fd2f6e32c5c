"""The connection of a store: the native client of the moment, two breakers, and a thread that brings it back.

Locks: ``lock`` guards the breakers, the counts and which client is the current one; never held over a wait.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from cache_manager.errors import StorageError, StoreUnavailableError
from cache_manager.keys import BlockKey
from cache_manager.spec import align
from cache_manager.storage.breaker import Breaker
from cache_manager.storage.mooncake import wire
from cache_manager.storage.mooncake.arena import Arena, Ranges
from cache_manager.storage.mooncake.client import ClientLostError, NativeClient
from cache_manager.storage.mooncake.master import check_ready, reach
from cache_manager.storage.mooncake.settings import MooncakeSettings, parse_address

FORMAT: Final = 2
HEADER_ROOM_NBYTES: Final = 1024
PROBE_S: Final = 2.0
PROBE_NBYTES: Final = 64
CLOSE_S: Final = 2 * PROBE_S + 1.0
LOOK_S: Final = 0.25
"""How often the keeper looks whether there is something to do."""

_T = TypeVar("_T")


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
        self.header_room = HEADER_ROOM_NBYTES  # what readers leave for a header: as much as the largest put here
        self._names = f"{settings.prefix}/{FORMAT}/"
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
        if wire.is_failure(code):
            self.writes.failed(time.monotonic(), f"the first write was answered {wire.describe(code)}", fatal=True)
        self._keeper = threading.Thread(target=self._keep, name="kvroute-mooncake-keeper", daemon=True)
        self._keeper.start()

    @property
    def native_pid(self) -> int:
        with self.lock:
            assert self._client is not None
            return self._client.pid

    def count(self, **by: int) -> None:
        with self.lock:
            self.counts.update({name: number for name, number in by.items() if number})

    def chunks(self, items: Sequence[_T], nbytes: Callable[[_T], int]) -> list[list[_T]]:
        """What one native call may have: so many names, and a slot of the arena."""
        chunks: list[list[_T]] = []
        room = 0
        for item in items:
            size = align(nbytes(item))
            if not chunks or len(chunks[-1]) == wire.KEYS_PER_CALL_MAX or size > room:
                chunks.append([])
                room = self.arena.slot_nbytes
            chunks[-1].append(item)
            room -= size
        return chunks

    def each(self, breaker: Breaker, chunks: Sequence[Sequence[_T]], call: Callable[[Sequence[_T]], list[int]]) -> None:
        """Make the calls; raise when not one name got an answer, else count the names that got none."""
        failed, answered, cause = 0, 0, 0
        error: StorageError | None = None
        for chunk in chunks:
            if error is None:
                try:
                    codes = call(chunk)
                except StorageError as stopped:
                    error = stopped
                else:
                    failures = [code for code in codes if wire.is_failure(code)]
                    failed += len(failures)
                    answered += len(codes) - len(failures)
                    cause = failures[0] if failures else cause
                    continue
            failed += len(chunk)
        self.count(**{"failed_reads" if breaker is self.reads else "failed_writes": failed})
        if failed and not answered:
            raise error or StorageError(f"Mooncake at {self.settings.master}: {wire.describe(cause)}")

    def ask(
        self, breaker: Breaker, what: type[wire.Exist | wire.Remove], keys: Sequence[BlockKey], give_up_s: float
    ) -> list[int]:
        """A code for each key; for one that was not asked because a call before had failed, ``LOST``."""
        codes: list[int] = []

        def call(chunk: Sequence[BlockKey]) -> list[int]:
            codes.extend(now := self.call(breaker, what([self.name(key) for key in chunk]), give_up_s))
            return now

        self.each(breaker, self.chunks(keys, lambda _: 0), call)
        return codes + [wire.LOST] * (len(keys) - len(codes))

    def name(self, key: BlockKey) -> str:
        return f"{self._names}{key.hex()}"

    def call(self, breaker: Breaker, call: wire.Call, give_up_s: float, lent: Ranges | None = None) -> list[int]:
        """The codes of one native call, which uses the memory ``lent``."""
        client = self._admitted(breaker)
        if not self._calls.acquire(timeout=max(give_up_s - self._blame_s - time.monotonic(), 0)):
            raise StorageError(f"{wire.CALLS_MAX} Mooncake calls are running and none ended in time")
        if give_up_s - time.monotonic() < self._blame_s:
            self._calls.release()
            raise StorageError(f"no time is left of {self.settings.timeout_ms} ms for another Mooncake call")
        future = client.submit(call)
        future.add_done_callback(lambda _: self._calls.release())
        if lent is not None:
            lent.call = future
        try:
            codes = client.wait(future, max(give_up_s - time.monotonic(), 0))
        except TimeoutError:
            cause = f"{type(call).__name__} was not answered within {self.settings.timeout_ms} ms"
            self._lost(client, cause)
            self.count(lost_calls=1)
            raise StorageError(f"Mooncake: {cause}; a process of the pool hangs") from None
        except ClientLostError as error:
            self._lost(client, str(error))
            self.count(lost_calls=1)
            raise
        assert len(codes) == len(call.names)
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
        if (self._client is None or self._client.gone) and self.arena.idle:
            self.arena.close()

    def _admitted(self, breaker: Breaker) -> NativeClient:
        with self.lock:
            if not breaker.closed or self._client is None:
                self.counts["bypassed"] += 1
                raise StoreUnavailableError(f"Mooncake at {self.settings.master} is not asked: {breaker.cause}")
            return self._client

    def _judge(self, breaker: Breaker, codes: list[int]) -> None:
        failures = [code for code in codes if wire.is_failure(code)]
        master = [code for code in failures if code in wire.MASTER]
        now_s = time.monotonic()
        with self.lock:
            if master:
                for each in (self.reads, self.writes):
                    each.failed(now_s, wire.describe(master[0]), fatal=True)
            elif failures and len(failures) == len(codes):
                breaker.failed(now_s, wire.describe(failures[0]))
            elif not failures:
                breaker.succeeded()

    def _lost(self, client: NativeClient, cause: str) -> None:
        client.kill()
        now_s = time.monotonic()
        with self.lock:
            if client is self._client:
                for each in (self.reads, self.writes):
                    each.failed(now_s, cause, fatal=True)

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
                    self.count(owner_failures=1)
                    self.stopping.wait(self.settings.pause_ms / 1e3)
                else:
                    if self.stopping.is_set():
                        owner.kill()
                    self._owner = owner
                    self.count(owner_restarts=1)

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
                good = breaker is self.reads or not wire.is_failure(code)
                breaker.end_probe(time.monotonic(), good=good, cause="" if good else wire.describe(code))
        if old is not None:
            give_up_s = time.monotonic() + self.settings.timeout_s
            while old.in_flight and time.monotonic() < give_up_s and not self.stopping.wait(0.01):
                pass
            self._end(old, wait_s=1.0)

    def _connect(self, give_up_s: float) -> tuple[NativeClient, int]:
        """A client that has asked the master something and tried to put and get, and the code of that trial."""
        client = self._start(self.arena, 0, give_up_s)
        try:
            probe = [f"{self.settings.prefix}/probe/{uuid.uuid4().hex}"]
            code = client.call(wire.Exist(probe), max(give_up_s - time.monotonic(), 0.1))[0]
            if code:
                where = f"master {self.settings.master}"
                raise StorageError(f"{where}: {wire.describe(code)}; are its version and ours equal?")
            give_up_s = min(give_up_s, time.monotonic() + self.settings.timeout_s + PROBE_S)
            return client, self._try_out(client, probe, give_up_s)
        except BaseException:
            client.kill()
            raise

    def _try_out(self, client: NativeClient, name: list[str], give_up_s: float) -> int:
        """Put, get and remove a small object; the first code that is not good, or 0."""
        with self.arena.lend([PROBE_NBYTES], give_up_s) as lent:
            room, wanted = self.arena.view[lent.offsets[0] :][:PROBE_NBYTES], os.urandom(PROBE_NBYTES)

            def ask(call: wire.Call) -> int:
                return client.call(call, max(give_up_s - time.monotonic(), 0.1), lent)[0]

            room[:] = wanted
            if code := ask(wire.Put(name, lent.offsets, lent.nbytes)):
                return code
            room[:] = bytes(PROBE_NBYTES)
            code = ask(wire.Get(name, lent.offsets, lent.nbytes))
            same = room == wanted
            ask(wire.Remove(name))  # by force: nobody else knows this name
            return 0 if code == PROBE_NBYTES and same else min(code, -1)

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
            arena_nbytes = arena.nbytes if arena else 0
            request = wire.SetUp(s.master, s.host or local, s.protocol, s.devices, segment_nbytes, arena_nbytes)
            client.set_up(request, max(give_up_s - time.monotonic(), 0.1))
        finally:
            with self.lock:
                self._starting = None
        return client

    def _end(self, client: NativeClient | None, wait_s: float) -> None:
        if client is not None:
            client.close(wait_s)
