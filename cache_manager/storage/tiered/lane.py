"""One tier of a tiered store: the backend, what waits to be put into it, its breakers, and the thread that does it.

Law: a record waits at most once for a tier, and until the tier has it, it is read from the queue, whatever the tier has
under its key. A key that was deleted is *owed*: hidden in this tier until the worker has deleted it there, which it
does before it puts anything, so that a record that was on its way when the key was deleted never comes back, and one
that is put later is not lost. A record that was put takes the place of what the tier has; where the tier does not take
it, the key is owed, so that no tier serves what another tier's answer has denied.

Locks: ``changed``, which all lanes of a store share, guards everything but the backend; it is never held over a call of
a backend.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, TypeVar

from cache_manager.errors import RecordError, StorageError, StoreClosedError, StoreUnavailableError
from cache_manager.keys import KEY_NBYTES, BlockKey
from cache_manager.ports import StorageBackend
from cache_manager.record import Buffer, RecordHeader, covers, takes_the_place
from cache_manager.storage.breaker import Breaker
from cache_manager.storage.tiered.counters import TierCounters
from cache_manager.storage.tiered.settings import TieredSettings
from cache_manager.storage.tiered.waiting import Offer, Waiting

BATCH_MAX: Final = 64
BATCH_NBYTES: Final = 8 << 20
OWED_MAX: Final = 65_536
RETRY_S: Final = 0.05
LOOK_S: Final = 1.0
PROBE_KEY: Final = BlockKey(b"probe".ljust(KEY_NBYTES, b"\0"))

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Lane:
    """See the module's law. ``held`` in a docstring: the caller holds ``changed``."""

    def __init__(
        self, name: str, backend: StorageBackend, settings: TieredSettings, changed: threading.Condition
    ) -> None:
        self.name = name
        self.backend = backend
        self.counts: Counter[str] = Counter()
        self.waiting: dict[BlockKey, Waiting] = {}  # in the order of their sequence
        self.owed: dict[BlockKey, int] = {}  # with the number of the deletion: a later one is not paid by an earlier
        self.reads, self.writes = (
            Breaker(settings.failures_max, settings.pause_ms / 1e3, settings.pause_max_ms / 1e3) for _ in range(2)
        )
        self._limits = {False: settings.queue_nbytes, True: settings.promote_nbytes}
        self._waiting_nbytes = {False: 0, True: 0}  # by Waiting.promoted; what is in flight included
        self._changed = changed
        self._deletions = 0
        self._retry_s = 0.0
        self._witness: tuple[BlockKey, int] | None = None  # a key and payload size that this tier was asked for
        self._stopping = False
        self._worker = threading.Thread(target=self._work, name=f"kvroute-tier-{name}", daemon=True)
        self._worker.start()

    @property
    def capacity_nbytes(self) -> int:
        """What may wait for this tier at most."""
        return sum(self._limits.values())

    @property
    def waiting_nbytes(self) -> int:
        return sum(self._waiting_nbytes.values())

    def counters(self) -> TierCounters:
        """Held."""
        return TierCounters(
            name=self.name,
            waiting=len(self.waiting),
            waiting_nbytes=self.waiting_nbytes,
            owed_deletes=len(self.owed),
            read_openings=self.reads.opened,
            write_openings=self.writes.opened,
            **self.counts,
        )

    def read(self, keys: Sequence[BlockKey], call: Callable[[], list[_T]]) -> list[_T] | StorageError:
        """The backend's answers for ``keys``, or why there are none; the breaker and the counts know of it."""
        with self._changed:
            if not self.reads.closed:
                self.counts["bypassed_reads"] += len(keys)
                return StoreUnavailableError(f"tier {self.name} is not asked: {self.reads.cause}")
        return self._judged(self.reads, "failed_reads", len(keys), call)

    def put_now(
        self, records: Sequence[Offer], give_up_s: float, sequence: Iterator[int], *, replace: bool
    ) -> dict[BlockKey, RecordHeader | None] | StorageError:
        """Put what is not owed, after waiting until ``give_up_s`` for what is; the answers, by key.

        What waits for this tier counts as its own: a record that takes the place of such a one waits instead of it.
        :class:`RecordError` is the caller's mistake and is raised.
        """
        answers: dict[BlockKey, RecordHeader | None] = {}
        ready: list[Offer] = []
        with self._changed:
            self._changed.wait_for(
                lambda: not self.writes.closed or not any(header.key in self.owed for header, _ in records),
                max(give_up_s - time.monotonic(), 0.0),
            )
            if not self.writes.closed:
                self.counts["bypassed_writes"] += len(records)
                return StoreUnavailableError(f"tier {self.name} is not asked: {self.writes.cause}")
            for header, view in records:
                record = self.waiting.get(header.key)
                if header.key in self.owed:
                    continue
                if record is None:
                    ready.append((header, view))
                elif not takes_the_place(header, record.header, replace=replace):
                    answers[header.key] = record.header
                elif self.has_room(view.nbytes, promoted=False):
                    self._cancel(header.key)
                    self.enqueue(header, bytes(view), next(sequence), promoted=False)
                    answers[header.key] = header
        if not ready:
            return answers
        headers: list[RecordHeader] = [header for header, _ in ready]
        views: list[Buffer] = [view for _, view in ready]

        def call() -> list[RecordHeader | None]:
            return self.backend.put(headers, views, replace=replace)

        found = self._judged(self.writes, "failed_writes", len(headers), call, RecordError)
        if isinstance(found, StorageError):
            return answers or found
        self._remember(headers)
        answers.update(zip([header.key for header in headers], found, strict=True))
        return answers

    def has_room(self, nbytes: int, *, promoted: bool) -> bool:
        """Held."""
        return self._waiting_nbytes[promoted] + nbytes <= self._limits[promoted]

    def enqueue(self, header: RecordHeader, payload: bytes, sequence: int, *, promoted: bool) -> bool:
        """Let a record wait for this tier; ``False`` when the queue has no room. Held."""
        if header.key in self.waiting:
            return True
        if self._stopping or not self.has_room(len(payload), promoted=promoted):
            return False
        self.waiting[header.key] = Waiting(header, payload, promoted, sequence)
        self._waiting_nbytes[promoted] += len(payload)
        self.counts["queued"] += 1
        self._changed.notify_all()
        return True

    def supersede(self, header: RecordHeader) -> None:
        """Another tier has this record now: what waits here and is less or of another origin goes. Held."""
        record = self.waiting.get(header.key)
        if record is None or covers(record.header, header):
            return
        self._cancel(header.key)
        if record.in_flight and record.promoted:  # it may land behind the newer one
            self.owe([header.key])

    def owe(self, keys: Iterable[BlockKey]) -> None:
        """This tier may have something else under these keys: hidden from now on, and deleted soon. Held."""
        for key in keys:
            if len(self.owed) < OWED_MAX:
                self._owe(key)
        self._changed.notify_all()

    def quarantine(self, keys: Iterable[BlockKey]) -> None:
        """Delete these in this tier alone, soon; readers do not find them here from now on. Held."""
        bad = list(keys)
        self.counts["corrupt"] += len(bad)
        self.owe(bad)  # where there is no room for more, it is found corrupt again

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """These are deleted. Held."""
        for key in keys:
            self._owe(key)
            self._cancel(key)
        self._changed.notify_all()

    def _cancel(self, key: BlockKey) -> None:
        if (record := self.waiting.pop(key, None)) is not None:
            self.counts["cancelled"] += 1
            record.cancelled = True
            if not record.in_flight:
                self._waiting_nbytes[record.promoted] -= len(record.payload)

    def _owe(self, key: BlockKey) -> None:
        self._deletions += 1
        self.owed[key] = self._deletions

    def drained(self, sequence: int) -> bool:
        """Whether all is done that was to be done up to ``sequence``. Held."""
        first = next(iter(self.waiting.values()), None)
        return not self.owed and (first is None or first.sequence > sequence)

    def flush(self) -> StorageError | None:
        """Flush the backend; why it was not."""

        def call() -> list[None]:
            self.backend.flush()
            return []

        with self._changed:
            if not self.writes.closed:
                return StoreUnavailableError(f"tier {self.name} is not asked: {self.writes.cause}")
        answer = self._judged(self.writes, "failed_writes", 0, call)
        return answer if isinstance(answer, StorageError) else None

    def stop(self) -> None:
        """The worker ends after the call that it is in. Held."""
        self._stopping = True
        self._changed.notify_all()

    def close(self, wait_s: float) -> StorageError | None:
        """After :meth:`stop`: give up what waits and close the backend; what was left undone."""
        self._worker.join(wait_s)
        with self._changed:
            left, owed = len(self.waiting), len(self.owed)
            self.forget(list(self.waiting))
            self.counts["cancelled"] -= left
            self.counts["abandoned"] += left
        try:
            self.backend.close()
        except StorageError as error:
            return error
        if left or owed:
            return StorageError(f"tier {self.name} was closed before it got {left} records and {owed} deletions")
        return None

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except Exception:  # noqa: BLE001 - the loop's edge: a worker that ended would leave its queue full for good
                with self._changed:
                    self.counts["worker_errors"] += 1
                    self._retry_s = time.monotonic() + LOOK_S
                _log.exception("tier %s: a call ended with what is no StorageError", self.name)

    def _next(self) -> Callable[[], object] | None:
        with self._changed:
            while not self._stopping:
                now_s = time.monotonic()
                if self.reads.due(now_s):
                    self.reads.begin_probe()
                    return lambda: self._probe(self.reads, self._try_read)
                if self.writes.due(now_s):
                    self.writes.begin_probe()
                    return lambda: self._probe(self.writes, self._try_write)
                busy = self.owed or self.waiting
                if busy and self.writes.closed and now_s >= self._retry_s:
                    return lambda: self._judged(self.writes, "failed_writes", 0, self._try_write)
                opened = [breaker.until for breaker in (self.reads, self.writes) if not breaker.closed]
                wake_s = min([now_s + LOOK_S, *opened, *([self._retry_s] if busy and self.writes.closed else [])])
                self._changed.wait(max(wake_s - now_s, 0.001))
        return None

    def _probe(self, breaker: Breaker, attempt: Callable[[], list[None]]) -> None:
        good, cause = False, "the probe failed"
        try:
            attempt()
            good = True
        except StorageError as error:
            cause = str(error)
        finally:
            with self._changed:
                breaker.end_probe(time.monotonic(), good=good, cause=cause)
                self._changed.notify_all()

    def _try_read(self) -> list[None]:
        """Any answer is a good one; the record that was asked for last shows whether payloads can be read."""
        if self._witness is None:
            self.backend.contains([PROBE_KEY])
        else:
            key, nbytes = self._witness
            self.backend.get_into([key], [memoryview(bytearray(nbytes))])
        return []

    def _try_write(self) -> list[None]:
        """The next piece of work: what is owed, then what waits; with neither, deleting what nobody has stored."""
        with self._changed:
            owed = dict(islice(self.owed.items(), BATCH_MAX))
            batch = [] if owed else self._take()
        if batch:
            self._put(batch)
            return []
        self.backend.delete(list(owed) or [PROBE_KEY])
        with self._changed:
            for key, number in owed.items():
                if self.owed[key] == number:
                    del self.owed[key]
            self.counts["deleted"] += len(owed)
            self._changed.notify_all()
        return []

    def _take(self) -> list[Waiting]:
        """The oldest records, which are in flight then. Held."""
        batch: list[Waiting] = []
        nbytes = 0
        for record in islice(self.waiting.values(), BATCH_MAX):
            nbytes += len(record.payload)
            if batch and nbytes > BATCH_NBYTES:
                break
            record.in_flight = True
            batch.append(record)
        return batch

    def _put(self, batch: Sequence[Waiting]) -> None:
        answers: list[RecordHeader | None] = []
        done = False
        try:
            try:
                answers = self._offer(batch)
            except RecordError:  # of one of them, which this tier will never take
                for record in batch:
                    try:
                        answers += self._offer([record])
                    except RecordError:
                        answers.append(None)
                        with self._changed:
                            self.owe([record.header.key])
            done = True
        finally:
            with self._changed:
                for i, record in enumerate(batch):
                    self._landed(record, answers[i]) if done else self._failed(record)
                self._changed.notify_all()
        self._remember([record.header for record in batch])

    def _offer(self, batch: Sequence[Waiting]) -> list[RecordHeader | None]:
        """Records that were put take the place of what is here; one that was read elsewhere does not."""
        answers: dict[int, RecordHeader | None] = {}
        for promoted in (False, True):
            if part := [record for record in batch if record.promoted is promoted]:
                headers: list[RecordHeader] = [record.header for record in part]
                found = self.backend.put(headers, [record.payload for record in part], replace=not promoted)
                if len(found) != len(part):
                    raise StorageError(f"tier {self.name} answered {len(found)} of {len(part)} records")
                answers.update(zip(map(id, part), found, strict=True))
        return [answers[id(record)] for record in batch]

    def _landed(self, record: Waiting, answer: RecordHeader | None) -> None:
        """Held."""
        record.in_flight = False
        followed = answer is not None and covers(answer, record.header)
        if not record.cancelled:
            del self.waiting[record.header.key]
            self.counts["refused" if not followed else "promoted" if record.promoted else "written"] += 1
            if answer is not None and not followed and not record.promoted:
                self.owe([record.header.key])
        self._waiting_nbytes[record.promoted] -= len(record.payload)

    def _failed(self, record: Waiting) -> None:
        """The call failed, and the record waits on. Held."""
        record.in_flight = False
        if record.cancelled:
            self._waiting_nbytes[record.promoted] -= len(record.payload)
        else:
            self.counts["failed_writes"] += 1

    def _judged(
        self,
        breaker: Breaker,
        counter: str,
        keys: int,
        call: Callable[[], list[_T]],
        mistake: type[StorageError] | None = None,
    ) -> list[_T] | StorageError:
        """Make a call and tell the breaker; ``mistake`` is the caller's, and nothing against the tier."""
        try:
            answers = call()
            if keys and len(answers) != keys:
                raise StorageError(f"tier {self.name} answered {len(answers)} of {keys} keys")
        except StorageError as error:
            if mistake is not None and isinstance(error, mistake):
                raise
            fatal = isinstance(error, StoreUnavailableError | StoreClosedError)
            with self._changed:
                now_s = time.monotonic()
                breaker.failed(now_s, str(error), fatal=fatal)
                self.counts[counter] += keys
                self._retry_s = now_s + RETRY_S
                self._changed.notify_all()
            return error
        with self._changed:
            breaker.succeeded()
        return answers

    def _remember(self, headers: Sequence[RecordHeader]) -> None:
        if headers:
            self._witness = headers[-1].key, headers[-1].payload_nbytes


__all__ = ["OWED_MAX", "Lane"]
