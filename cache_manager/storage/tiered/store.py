"""A storage backend made of others: the first tier that has a record answers, and the tiers before it learn of it.

Every copy is verified here, tier by tier, so that a bad one costs its tier that copy and the next tier is asked;
:class:`RecordStore` verifies what comes out once more, against its layout.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import count

from cache_manager.errors import ConfigError, RecordError, StorageError, StoreClosedError, StoreUnavailableError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence, StorageBackend
from cache_manager.record import Buffer, RecordHeader, check_record, covers
from cache_manager.storage.rounds import rounds
from cache_manager.storage.tiered.counters import TieredCounters
from cache_manager.storage.tiered.lane import OWED_MAX, Lane
from cache_manager.storage.tiered.running import Reading, Running
from cache_manager.storage.tiered.settings import TieredSettings, WhenFull
from cache_manager.storage.tiered.waiting import Offer

_FOUR = ("records", "used_nbytes", "free_nbytes", "capacity_nbytes")


class TieredStore:
    """A ``StorageBackend`` over named tiers, the one that is asked first in front. It owns and closes them.

    ``put`` answers what the first tier that works says, or, where that has no room, a later one: **that tier decides**.
    What it stored the other tiers get from a queue of copies, which an eviction in the front does not touch, and there
    it takes the place of what they have; a tier that cannot take it deletes what it has under the key. So no tier hands
    out a record that an answer of ``put`` has denied. (It may hand out more rows of the same origin.)

    ``get_into`` asks the tiers in turn for what is still missing, their queues first; what a later tier had is put into
    the earlier ones by their workers. A tier that fails is asked no more until a probe has found it well, and
    :class:`StorageError` is raised only when no tier answered.

    ``delete`` hides the keys at once, everywhere, and waits until every tier has deleted them; where one cannot,
    :class:`StorageError` says so, and the key stays hidden there until it has. Queues, and what is hidden, live as
    long as this object: after a crash a later tier may lack records, and a failed tier may have deleted ones.

    A call lasts as long as the calls of the tiers, which have to bound theirs. For the process that opened it.
    """

    def __init__(self, tiers: Mapping[str, StorageBackend], settings: TieredSettings | None = None) -> None:
        if len(tiers) < 2:
            raise ConfigError("tiered: store tiers", "2 or more", len(tiers))
        self.settings = settings or TieredSettings()
        self._pid = os.getpid()
        self._closed = False
        self._users = 0  # calls that are running
        self._changed = threading.Condition()
        self._counts: Counter[str] = Counter()
        self._sequence = count(1)
        self._running = Running(self._changed)
        self._usages: list[Mapping[str, int]] = [dict(backend.usage()) for backend in tiers.values()]
        self._lanes = [Lane(name, backend, self.settings, self._changed) for name, backend in tiers.items()]

    @property
    def counters(self) -> TieredCounters:
        """The counts of this moment, consistent with each other."""
        with self._changed:
            return TieredCounters(
                asked=self._counts["asked"],
                misses=self._counts["misses"],
                incomplete_misses=self._counts["incomplete_misses"],
                corrupt=self._counts["corrupt"],
                failed=self._counts["failed"],
                tiers=tuple(lane.counters() for lane in self._lanes),
            )

    def put(
        self, headers: Sequence[RecordHeader], payloads: Sequence[Buffer], *, replace: bool = False
    ) -> list[RecordHeader | None]:
        views: list[memoryview] = []
        for header, payload in zip(headers, payloads, strict=True):
            view = memoryview(payload)
            if view.nbytes != header.payload_nbytes or not view.c_contiguous:
                raise RecordError("payload", f"{header.payload_nbytes} flat bytes", f"{view.nbytes} {view.strides}")
            views.append(view.cast("B"))
        answers: dict[BlockKey, RecordHeader] = {}
        with self._calling(), self._running.put({header.key for header in headers}):
            for once in rounds(header.key for header in headers):
                answers |= self._put({headers[i].key: (headers[i], views[i]) for i in once}, replace=replace)
        return [answers.get(header.key) for header in headers]

    def _put(self, todo: Mapping[BlockKey, Offer], *, replace: bool) -> dict[BlockKey, RecordHeader]:
        """What the deciding tier has of each key; the other tiers follow it."""
        give_up_s = time.monotonic() + self.settings.delete_ms / 1e3
        taken: dict[BlockKey, RecordHeader] = {}
        asked: list[set[BlockKey]] = []  # by tier, the keys that it answered
        errors: list[StorageError] = []
        for lane in self._lanes:
            left = [record for key, record in todo.items() if key not in taken]
            answers = lane.put_now(left, give_up_s, self._sequence, replace=replace) if left else {}
            if isinstance(answers, StorageError):
                errors.append(answers)
                answers = {}
            asked.append(set(answers))
            taken.update({key: answer for key, answer in answers.items() if answer is not None})
        if todo and len(errors) == len(self._lanes):
            raise _no_tier(errors)
        new = {key for key, answer in taken.items() if answer is todo[key][0]}
        with self._changed:
            self._running.tell_readings(new)
            for lane in self._lanes:
                for key in new:
                    lane.supersede(todo[key][0])
        same = new | {key for key, answer in taken.items() if _is_same(answer, todo[key][0])}
        for lane, answered in zip(self._lanes, asked, strict=True):
            self._pass_on(lane, [todo[key] for key in taken if key in same - answered], new, give_up_s)
        return taken

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[RecordHeader | Absence]:
        """Bytes are copied for promotion before this returns; everything else of it happens later."""
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys and {len(buffers)} buffers")
        with self._calling(), self._running.reading() as reading:
            found: list[RecordHeader | Absence] = [Absence.MISS] * len(keys)
            errors: list[StorageError] = []
            bad: set[int] = set()
            hits: Counter[str] = Counter()
            wanted = list(range(len(keys)))
            for depth, lane in enumerate(self._lanes):
                if not wanted:
                    break
                with self._changed:  # looked up first: it may have reached the tier after that was asked
                    waiting = {i: record for i in wanted if (record := lane.waiting.get(keys[i])) is not None}
                left = [i for i in wanted if i not in waiting]
                if (error := self._ask(lane, left, keys, buffers, found, bad)) is not None:
                    errors.append(error)
                queue_hits = 0
                for i, record in waiting.items():
                    if found[i] is Absence.MISS and buffers[i].nbytes == len(record.payload):
                        buffers[i].cast("B")[:] = record.payload
                        found[i] = record.header
                        queue_hits += 1
                here = [i for i in wanted if found[i] is not Absence.MISS]
                wanted = [i for i in wanted if found[i] is Absence.MISS]
                hits[lane.name] = len(here)
                with self._changed:
                    lane.counts["queue_hits"] += queue_hits
                if self.settings.promote_nbytes:
                    self._promote(self._lanes[:depth], here, keys, buffers, found, reading)
            failed = bool(keys) and len(errors) == len(self._lanes) and not sum(hits.values())
            corrupt = [] if errors else [i for i in wanted if i in bad]
            with self._changed:
                self._counts["asked"] += len(keys)
                for lane in self._lanes:
                    lane.counts["hits"] += hits[lane.name]
                self._counts["corrupt"] += len(corrupt)
                self._counts["failed" if failed else "misses"] += len(wanted) - len(corrupt)
                self._counts["incomplete_misses"] += len(wanted) if errors and not failed else 0
            if failed:
                raise _no_tier(errors)
            for i in corrupt:
                found[i] = Absence.CORRUPT
            return found

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        with self._calling():
            there = [False] * len(keys)
            errors: list[StorageError] = []
            for lane in self._lanes:
                with self._changed:
                    there = [here or key in lane.waiting for key, here in zip(keys, there, strict=True)]
                    left = [i for i, key in enumerate(keys) if not there[i] and key not in lane.owed]
                if not left:
                    continue
                asked = [keys[i] for i in left]
                answers = lane.read(asked, lambda lane=lane, asked=asked: lane.backend.contains(asked))  # type: ignore[misc]
                if isinstance(answers, StorageError):
                    errors.append(answers)
                    continue
                for i, here in zip(left, answers, strict=True):
                    there[i] = here
            if len(errors) == len(self._lanes) and not any(there):
                raise _no_tier(errors)
            return there

    def delete(self, keys: Sequence[BlockKey]) -> None:
        with self._calling(), self._changed:
            wanted = set(keys)
            if any(len(lane.owed.keys() | wanted) > OWED_MAX for lane in self._lanes):
                raise StorageError(f"more than {OWED_MAX} deletions wait for a tier that does not work")
            for lane in self._lanes:
                lane.forget(wanted)
            self._running.tell_readings(wanted)
            self._changed.wait_for(
                lambda: not any(lane.writes.closed and lane.owed.keys() & wanted for lane in self._lanes),
                self.settings.delete_ms / 1e3,
            )
            behind = [lane for lane in self._lanes if lane.owed.keys() & wanted]
            if behind:
                why = "; ".join(f"{lane.name}: {lane.writes.cause or 'no answer yet'}" for lane in behind)
                raise StorageError(f"deleted here, and hidden until it is deleted in tier {why}")

    def flush(self) -> None:
        """Return when every tier has and has flushed what was put and promoted before, within ``flush_ms``."""
        with self._calling():
            with self._changed:
                last = next(self._sequence)
                self._changed.wait_for(
                    lambda: all(lane.drained(last) for lane in self._lanes), self.settings.flush_ms / 1e3
                )
                errors = [
                    StorageError(
                        f"{len(lane.waiting)} records and {len(lane.owed)} deletions still wait for tier {lane.name}"
                        f" {lane.writes.cause}".rstrip()
                    )
                    for lane in self._lanes
                    if not lane.drained(last)
                ]
            errors += [error for lane in self._lanes if (error := lane.flush()) is not None]
            if errors:
                raise StorageError("; ".join(map(str, errors))) from errors[0]

    def usage(self) -> Mapping[str, int]:
        """Sums over the tiers and their queues, in which a record counts once for each copy, and each tier's own four
        as ``tier0_records`` and so on. ``stale_tiers`` did not answer: theirs are the numbers of an earlier call."""
        with self._calling():
            total: Counter[str] = Counter(dict.fromkeys((*_FOUR, "stale_tiers"), 0))
            for depth, lane in enumerate(self._lanes):
                with self._changed:  # before the tier is asked: a record on its way counts twice rather than never
                    waiting, nbytes = len(lane.waiting), lane.waiting_nbytes
                try:
                    self._usages[depth] = dict(lane.backend.usage())
                except StorageError:
                    total["stale_tiers"] += 1
                here = self._usages[depth]
                total.update({name: here[name] for name in _FOUR})
                total.update({f"tier{depth}_{name}": here[name] for name in _FOUR})
                total.update(records=waiting, used_nbytes=nbytes, free_nbytes=lane.capacity_nbytes - nbytes)
                total.update(capacity_nbytes=lane.capacity_nbytes)
            return dict(total)

    def close(self) -> None:
        """Wait up to ``close_ms`` for the queues, then close the tiers; idempotent. :class:`StorageError`: closed, but
        not every tier has everything."""
        if os.getpid() != self._pid:
            return
        give_up_s = time.monotonic() + self.settings.close_ms / 1e3
        with self._changed:
            if self._closed:
                return
            self._closed = True
            last = next(self._sequence)
            self._changed.wait_for(
                lambda: not self._users and all(lane.drained(last) for lane in self._lanes),
                self.settings.close_ms / 1e3,
            )
            for lane in self._lanes:
                lane.stop()
        errors: list[StorageError] = []

        def close(lane: Lane) -> None:
            if (error := lane.close(max(give_up_s - time.monotonic(), 1.0))) is not None:
                errors.append(error)

        with ExitStack() as rest:  # a tier that ends with what is no StorageError leaves no other one open
            for lane in reversed(self._lanes):
                rest.callback(close, lane)
        if errors:
            raise StorageError("; ".join(map(str, errors))) from errors[0]

    @contextmanager
    def _calling(self) -> Iterator[None]:
        if os.getpid() != self._pid:
            raise StoreClosedError("the tiered store was opened before fork; open one in a spawned process")
        with self._changed:
            if self._closed:
                raise StoreClosedError("the tiered store is closed")
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    def _pass_on(self, lane: Lane, records: Sequence[Offer], new: set[BlockKey], give_up_s: float) -> None:
        """Let records wait for a tier; where its queue is full, what the settings say.

        Of those that are ``new`` the tier may have another record, which goes where the new one does not come.
        """
        over: list[Offer] = []
        for header, view in records:
            with self._changed:
                room = lane.has_room(view.nbytes, promoted=False)
            payload = bytes(view) if room else b""
            with self._changed:
                if not room or not lane.enqueue(header, payload, next(self._sequence), promoted=False):
                    over.append((header, view))
        if not over:
            return
        answers: dict[BlockKey, RecordHeader | None] | StorageError = {}
        if self.settings.when_full is WhenFull.WRITE:
            with suppress(RecordError):  # this tier will never take it; another one has
                answers = lane.put_now(over, give_up_s, self._sequence, replace=True)
        written = set[BlockKey]()
        if not isinstance(answers, StorageError):
            offered = {header.key: header for header, _ in over}
            written = {key for key, answer in answers.items() if answer is not None and covers(answer, offered[key])}
        with self._changed:
            lane.counts["written_through"] += len(written)
            lane.counts["dropped"] += len(over) - len(written)
            lane.owe(header.key for header, _ in over if header.key in new and header.key not in written)

    def _ask(
        self,
        lane: Lane,
        wanted: Sequence[int],
        keys: Sequence[BlockKey],
        buffers: Sequence[memoryview],
        found: list[RecordHeader | Absence],
        bad: set[int],
    ) -> StorageError | None:
        """Fill in the sound records that a tier has of ``wanted``; the numbers of its bad ones are added to ``bad``."""
        with self._changed:
            asked = [i for i in wanted if keys[i] not in lane.owed]
        if not asked:
            return None
        names = [keys[i] for i in asked]
        answers = lane.read(names, lambda: lane.backend.get_into(names, [buffers[i] for i in asked]))
        if isinstance(answers, StorageError):
            return answers
        here: set[int] = set()
        for i, answer in zip(asked, answers, strict=True):
            if answer is Absence.MISS:
                continue
            try:
                if isinstance(answer, Absence):
                    raise RecordError("header", "a sound one", "none")
                check_record(answer, keys[i], answer.fingerprint, buffers[i])
            except RecordError:
                here.add(i)
            else:
                found[i] = answer
        if here:
            bad |= here
            with self._changed:
                lane.quarantine({keys[i] for i in here})
        return None

    def _promote(
        self,
        lanes: Sequence[Lane],
        hits: Sequence[int],
        keys: Sequence[BlockKey],
        buffers: Sequence[memoryview],
        found: Sequence[RecordHeader | Absence],
        reading: Reading,
    ) -> None:
        """Let the records that were hit wait for the tiers in front; what was deleted meanwhile does not."""
        for i in hits if lanes else ():
            header = found[i]
            assert isinstance(header, RecordHeader)
            nbytes = header.payload_nbytes
            with self._changed:
                new = [lane for lane in lanes if keys[i] not in lane.waiting]
                open_ = [lane for lane in new if lane.writes.closed and lane.has_room(nbytes, promoted=True)]
                for lane in new:
                    lane.counts["dropped_promotions"] += lane not in open_
            payload = bytes(buffers[i]) if open_ else b""
            with self._changed:
                if keys[i] in reading.changed:
                    continue
                for lane in open_:
                    if not lane.enqueue(header, payload, next(self._sequence), promoted=True):
                        lane.counts["dropped_promotions"] += 1


def _is_same(stored: RecordHeader, offered: RecordHeader) -> bool:
    return covers(stored, offered) and covers(offered, stored)


def _no_tier(errors: Sequence[StorageError]) -> StorageError:
    """What to raise when no tier answered; its message has every cause."""
    kind = StoreUnavailableError if any(isinstance(e, StoreUnavailableError) for e in errors) else StorageError
    error = kind("no tier answered: " + "; ".join(map(str, errors)))
    error.__cause__ = errors[0]
    return error


__all__ = ["TieredStore"]
