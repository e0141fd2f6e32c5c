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
from cache_manager.storage.arena import Arena, Ranges
from cache_manager.storage.batch import chunks
from cache_manager.storage.mooncake import wire
from cache_manager.storage.mooncake.breaker import Breaker
from cache_manager.storage.mooncake.client import ClientLostError, NativeClient
from cache_manager.storage.mooncake.master import check_ready, reach
from cache_manager.storage.mooncake.settings import MooncakeSettings, parse_address

FORMAT: Final = 2
HEADER_ROOM_NBYTES: Final = 1024
FAILURES_MAX: Final = 3
"""Calls in a row that fail altogether, before none is made for a while."""
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
            Breaker(FAILURES_MAX, settings.pause_ms / 1e3, settings.pause_max_ms / 1e3) for _ in range(2)
        )
        self.header_room = HEADER_ROOM_NBYTES  # what readers leave for a header: as much as the largest put here
        self._names = f"{settings.prefix}/{FORMAT}/"
        self.stopping = threading.Event()
        self.arena = Arena(settings.arena_nbytes)
        self._owner: NativeClient | None = None
        self._starting: NativeClient | None = None
        try:
            give_up_s = time.monotonic() + settings.connect_ms / 1e3
            if settings.segment_nbytes:
                self._owner, _ = self._start(settings.segment_nbytes, give_up_s)
            self._client, code = self._start(0, give_up_s)
        except BaseException:
            self._end_owner()
            self.arena.close()
            raise
        if wire.is_failure(code):
            self.writes.failed(time.monotonic(), f"the first write was answered {wire.describe(code)}", fatal=True)
        self._keeper = threading.Thread(target=self._keep, name="kvroute-mooncake-keeper", daemon=True)
        self._keeper.start()

    def count(self, **by: int) -> None:
        with self.lock:
            self.counts.update({name: number for name, number in by.items() if number})

    def name(self, key: BlockKey) -> str:
        return f"{self._names}{key.hex()}"

    def each(
        self,
        breaker: Breaker,
        items: Sequence[_T],
        nbytes: Callable[[_T], int],
        call: Callable[[Sequence[_T]], list[int]],
    ) -> list[int]:
        """A code for each item, by calls for as many as one may have; ``LOST`` for all after a call that failed.

        Raises when not one item got an answer, else counts those that got none.
        """
        codes: list[int] = []
        error: StorageError | None = None
        try:
            for chunk in chunks(
                items, lambda item: align(nbytes(item)), self.arena.slot_nbytes, wire.KEYS_PER_CALL_MAX
            ):
                self.admitted(breaker)  # before a slot is waited for and filled
                codes += call(chunk)
        except StorageError as stopped:
            error = stopped
        codes += [wire.LOST] * (len(items) - len(codes))
        failures = [code for code in codes if wire.is_failure(code)]
        self.count(**{"failed_reads" if breaker is self.reads else "failed_writes": len(failures)})
        if failures and len(failures) == len(codes):
            raise error or StorageError(f"Mooncake at {self.settings.master}: {wire.describe(failures[0])}")
        return codes

    def ask(
        self, breaker: Breaker, what: type[wire.Exist | wire.Remove], keys: Sequence[BlockKey], give_up_s: float
    ) -> list[int]:
        """A code for each key; see :meth:`each`."""

        def call(chunk: Sequence[BlockKey]) -> list[int]:
            with self.arena.lend([], give_up_s) as lent:
                return self.call(breaker, what([self.name(key) for key in chunk]), give_up_s, lent)

        return self.each(breaker, keys, lambda _: 0, call)

    def admitted(self, breaker: Breaker) -> NativeClient:
        """Who makes calls now; :class:`StoreUnavailableError` while none is to be made."""
        with self.lock:
            if not breaker.closed:
                self.counts["bypassed"] += 1
                raise StoreUnavailableError(f"Mooncake at {self.settings.master} is not asked: {breaker.cause}")
            return self._client

    def call(self, breaker: Breaker, call: wire.Call, give_up_s: float, lent: Ranges) -> list[int]:
        """The codes of one native call, which uses the memory ``lent``."""
        client = self.admitted(breaker)
        left_s = give_up_s - time.monotonic()
        if left_s < self.settings.timeout_s / 4:  # too little to show that the pool hangs
            raise StorageError(f"no time is left of {self.settings.timeout_ms} ms for another Mooncake call")
        try:
            codes = client.call(call, left_s, lent)
        except ClientLostError as error:
            self._lost(client, str(error))
            self.count(lost_calls=1)
            raise
        assert len(codes) == len(call.names)
        failures = [code for code in codes if wire.is_failure(code)]
        with self.lock:
            if master := wire.MASTER.intersection(failures):
                self._open_both(wire.describe(max(master)))
            elif failures and len(failures) == len(codes):
                breaker.failed(time.monotonic(), wire.describe(failures[0]))
            elif not failures:
                breaker.succeeded()
        return codes

    def close(self) -> None:
        """End the client, the owner and the keeper; every wait is bounded. No call is running, or its end is near."""
        with self.lock:
            self.stopping.set()
            if self._starting is not None:
                self._starting.kill()
        self._keeper.join(CLOSE_S)
        self._client.end()
        self._end_owner()
        if self._client.gone and self.arena.idle:
            self.arena.close()

    def _lost(self, client: NativeClient, cause: str) -> None:
        with self.lock:
            if client is self._client:
                self._open_both(cause)

    def _open_both(self, cause: str) -> None:
        """Neither a read nor a write would succeed. The lock is held."""
        for breaker in (self.reads, self.writes):
            breaker.failed(time.monotonic(), cause, fatal=True)

    def _keep(self) -> None:
        """The keeper's loop: probe what is due, restart an owner that ended."""
        while not self.stopping.wait(LOOK_S):
            if self._client.gone:
                self._lost(self._client, "the native client has ended")
            self._recover()
            if self._owner is not None and self._owner.gone:
                try:
                    self._owner, _ = self._start(self.settings.segment_nbytes, time.monotonic() + PROBE_S)
                except StorageError:
                    self.count(owner_failures=1)
                    self.stopping.wait(self.settings.pause_ms / 1e3)
                else:
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
            client, code = self._start(0, now_s + self.settings.connect_ms / 1e3)
        except StorageError as error:
            with self.lock:
                for breaker in due:
                    breaker.end_probe(time.monotonic(), good=False, cause=str(error))
            return
        with self.lock:
            old, self._client = self._client, client
            self.counts["rebuilds"] += 1
            for breaker in due:
                good = breaker is self.reads or not wire.is_failure(code)
                breaker.end_probe(time.monotonic(), good=good, cause="" if good else wire.describe(code))
        give_up_s = time.monotonic() + self.settings.timeout_s
        while old.in_flight and time.monotonic() < give_up_s and not self.stopping.wait(0.01):
            pass
        old.end()

    def _start(self, segment_nbytes: int, give_up_s: float) -> tuple[NativeClient, int]:
        """A client that lends memory, or one that was tried out, and the first code of the trial that is not good.

        The master is asked first without the native library, which would wait for long.
        """
        s = self.settings
        local = reach(parse_address(s.master, "mooncake: master"), min(PROBE_S, s.connect_ms / 1e3))
        check_ready(s.admin_address, PROBE_S)
        arena = None if segment_nbytes else self.arena
        with self.lock:
            if self.stopping.is_set():
                raise StorageError("the store is being closed")
            try:
                client = self._starting = NativeClient(arena, s.timeout_ms, s.log)
            except OSError as error:  # no process or descriptor is left, or the log cannot be written
                raise StorageError(f"the native Mooncake client cannot be started: {error}") from error
        try:
            arena_nbytes = arena.nbytes if arena else 0
            request = wire.SetUp(s.master, s.host or local, s.protocol, s.devices, segment_nbytes, arena_nbytes)
            client.set_up(request, max(give_up_s - time.monotonic(), 0.1))
            return client, self._try_out(client, give_up_s) if arena else 0
        except BaseException:
            client.kill()
            raise
        finally:
            with self.lock:
                self._starting = None

    def _try_out(self, client: NativeClient, give_up_s: float) -> int:
        """Ask for, put, get and remove a small object; the first code that is not good, or 0."""
        name = [f"{self.settings.prefix}/probe/{uuid.uuid4().hex}"]
        give_up_s = min(give_up_s, time.monotonic() + self.settings.timeout_s + PROBE_S)
        with self.arena.lend([PROBE_NBYTES], give_up_s) as lent:
            # No view of the arena is kept: an error that has one would keep the arena from being closed.
            room, wanted = slice(lent.offsets[0], lent.offsets[0] + PROBE_NBYTES), os.urandom(PROBE_NBYTES)

            def ask(call: wire.Call) -> int:
                return client.call(call, max(give_up_s - time.monotonic(), 0.1), lent)[0]

            if code := ask(wire.Exist(name)):
                where = f"master {self.settings.master}"
                raise StorageError(f"{where}: {wire.describe(code)}; are its version and ours equal?")
            self.arena.view[room] = wanted
            if code := ask(wire.Put(name, lent.offsets, lent.nbytes)):
                return code
            self.arena.view[room] = bytes(PROBE_NBYTES)
            code = ask(wire.Get(name, lent.offsets, lent.nbytes))
            same = self.arena.view[room] == wanted
            ask(wire.Remove(name))  # by force: nobody else knows this name
            return 0 if code == PROBE_NBYTES and same else min(code, -1)

    def _end_owner(self) -> None:
        if self._owner is not None:
            self._owner.close(self.settings.close_ms / 1e3)
