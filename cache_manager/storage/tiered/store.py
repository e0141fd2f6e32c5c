"""A storage backend made of others: the first tier that has a record answers, and the tiers before it learn of it.

No thread, no queue: whoever has to go on while a slow tier is written has a job for it (:mod:`cache_manager.jobs`),
which keeps the block instead of a copy. Every copy is verified, so that a bad one costs its tier that copy.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

from cache_manager.errors import ConfigError, RecordError, StorageError, StoreClosedError, StoreUnavailableError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence, StorageBackend
from cache_manager.record import Buffer, RecordHeader, check_record, covers, takes_the_place
from cache_manager.storage.guard import ClosingStore
from cache_manager.storage.rounds import rounds
from cache_manager.storage.tiered.tier import OWED_MAX, Tier, TieredCounters, TieredSettings

PAID_MAX: Final = 512
"""Old debts of a tier that one call pays beside its own work."""

_FOUR = ("records", "used_nbytes", "free_nbytes", "capacity_nbytes")

Offer = tuple[RecordHeader, memoryview]


class TieredStore(ClosingStore):
    """A ``StorageBackend`` over named tiers, the one that is asked first in front. It owns and closes them.

    ``put`` returns when every tier that works has the record, or has said that it has no room. A record that any of
    them has, and that the offered one may not replace, stays, and is the answer. A tier that did not get what was
    stored owes the key: it hides it until it has deleted what it may have. So no tier hands out a record that an answer
    of ``put`` has denied.

    ``get_into`` asks the tiers in turn for what is still missing; what a later tier had is put into the earlier ones
    before it returns. :class:`StorageError` is raised only when no tier answered, and by ``delete`` when a tier could
    not: the key stays hidden there. A call lasts as long as the calls of the tiers, which have to bound theirs.

    Debts live as long as this object: after a crash a tier that had failed may have records that were deleted or
    replaced meanwhile. For the process that opened it.
    """

    def __init__(self, tiers: Mapping[str, StorageBackend], settings: TieredSettings | None = None) -> None:
        if len(tiers) < 2:
            raise ConfigError("tiered: store tiers", "2 or more", len(tiers))
        self.settings = settings or TieredSettings()
        self._pid = os.getpid()
        self._closed = False
        self._lock = threading.Condition()
        self._counts: Counter[str] = Counter()
        self._busy: set[BlockKey] = set()  # keys that a call may change
        self._hidden: set[BlockKey] = set()  # of these, those that are changing: in one tier and not yet in all
        self._readings: list[set[BlockKey]] = []  # of each read that is running, the keys that changed since it began
        self._usages: list[Mapping[str, int]] = [dict(backend.usage()) for backend in tiers.values()]
        self._tiers = [Tier(name, backend, self.settings, self._lock) for name, backend in tiers.items()]

    @property
    def counters(self) -> TieredCounters:
        """The counts of this moment, consistent with each other."""
        names = ("asked", "misses", "incomplete_misses", "corrupt", "failed")
        with self._lock:
            counts = {name: self._counts[name] for name in names}
            return TieredCounters(**counts, tiers=tuple(tier.counters() for tier in self._tiers))

    def put(
        self, headers: Sequence[RecordHeader], payloads: Sequence[Buffer], *, replace: bool = False
    ) -> list[RecordHeader | None]:
        self._check_open()
        views: list[memoryview] = []
        for header, payload in zip(headers, payloads, strict=True):
            view = memoryview(payload)
            if view.nbytes != header.payload_nbytes or not view.c_contiguous:
                raise RecordError("payload", f"{header.payload_nbytes} flat bytes", f"{view.nbytes} {view.strides}")
            views.append(view.cast("B"))
        answers: dict[BlockKey, RecordHeader] = {}
        with self._holding({header.key for header in headers}):
            for once in rounds(header.key for header in headers):
                answers |= self._put({headers[i].key: (headers[i], views[i]) for i in once}, replace=replace)
        return [answers.get(header.key) for header in headers]

    def _put(self, todo: Mapping[BlockKey, Offer], *, replace: bool) -> dict[BlockKey, RecordHeader]:
        """What the store has of each key, which the caller holds; a key that changes is hidden until it has changed."""
        taken: dict[BlockKey, RecordHeader] = {}
        new: set[BlockKey] = set()
        errors: dict[Tier, StorageError] = {}
        try:
            for depth, tier in enumerate(self._tiers):
                self._pay_some(tier, todo)
                with self._lock:
                    asked = [
                        record
                        for key, record in todo.items()
                        if key not in tier.owed and (key not in taken or _is_same(taken[key], record[0]))
                    ]
                try:
                    answers = tier.put(asked, "written", replace=replace) if asked else {}
                except RecordError:
                    if not taken:
                        raise
                    answers = {}  # this tier will never take them; an earlier one has
                if isinstance(answers, StorageError):
                    errors[tier] = answers
                    continue
                with self._lock:
                    for key, answer in answers.items():
                        header = todo[key][0]
                        if answer is None:
                            continue
                        if key not in taken:
                            taken[key] = answer
                            if answer is header:
                                new.add(key)
                                self._hidden.add(key)
                        elif not _is_same(answer, header):
                            if takes_the_place(header, answer, replace=replace):  # it should have, and has not
                                tier.owe([key])
                            else:  # this tier's stays, and what the earlier ones took goes
                                taken[key] = answer
                                new.discard(key)
                                for other in self._tiers[:depth]:
                                    other.owe([key])
            if errors and not taken and len(errors) == len(self._tiers):
                raise _no_tier(list(errors.values()))
        finally:
            with self._lock:
                for tier, error in errors.items():
                    tried = not isinstance(error, StoreUnavailableError)  # then it may have got what was offered
                    for key, (header, _) in todo.items():
                        kept = key in taken and key not in new and _is_same(taken[key], header)
                        if key in new or (tried and not kept):
                            tier.owe([key])
                self._tell_readings(new)
                self._hidden.difference_update(todo)
        for tier in self._tiers:
            tier.pay(todo)
        return taken

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[RecordHeader | Absence]:
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys and {len(buffers)} buffers")
        self._check_open()
        found: list[RecordHeader | Absence] = [Absence.MISS] * len(keys)
        errors: list[StorageError] = []
        bad: set[int] = set()
        hits: Counter[str] = Counter()
        wanted = list(range(len(keys)))
        with self._reading() as changed:
            for depth, tier in enumerate(self._tiers):
                if wanted and (error := self._ask(tier, wanted, keys, buffers, found, bad)) is not None:
                    errors.append(error)
                here = [i for i in wanted if found[i] is not Absence.MISS]
                wanted = [i for i in wanted if found[i] is Absence.MISS]
                hits[tier.name] = len(here)
                if depth and here:
                    self._promote(self._tiers[:depth], here, keys, buffers, found, changed)
        failed = bool(keys) and len(errors) == len(self._tiers)
        corrupt = [] if errors else [i for i in wanted if i in bad]
        with self._lock:
            self._counts["asked"] += len(keys)
            for tier in self._tiers:
                tier.counts["hits"] += hits[tier.name]
            self._counts["corrupt"] += len(corrupt)
            self._counts["failed" if failed else "misses"] += len(wanted) - len(corrupt)
            self._counts["incomplete_misses"] += len(wanted) if errors and not failed else 0
        if failed:
            raise _no_tier(errors)
        for i in corrupt:
            found[i] = Absence.CORRUPT
        return found

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        self._check_open()
        there = [False] * len(keys)
        errors: list[StorageError] = []
        for tier in self._tiers:
            with self._lock:
                left = [i for i, key in enumerate(keys) if not there[i] and self._shows(tier, key)]
            if not left:
                continue
            asked = [keys[i] for i in left]
            answers = tier.read(asked, lambda tier=tier, asked=asked: tier.backend.contains(asked))  # type: ignore[misc]
            if isinstance(answers, StorageError):
                errors.append(answers)
                continue
            for i, here in zip(left, answers, strict=True):
                there[i] = here
        if len(errors) == len(self._tiers) and not any(there):
            raise _no_tier(errors)
        return there

    def delete(self, keys: Sequence[BlockKey]) -> None:
        self._check_open()
        wanted = set(keys)
        with self._holding(wanted):
            with self._lock:
                if any(len(tier.owed.keys() | wanted) > OWED_MAX for tier in self._tiers):
                    raise StorageError(f"more than {OWED_MAX} deletions wait for a tier that does not work")
                for tier in self._tiers:
                    tier.owe(wanted)
                self._tell_readings(wanted)
            behind = {tier.name: error for tier in self._tiers if (error := tier.pay(wanted, anyway=True)) is not None}
        if behind:
            why = "; ".join(f"{name}: {error}" for name, error in behind.items())
            raise StorageError(f"deleted here, and hidden until it is deleted in tier {why}")

    def flush(self) -> None:
        """Return when every tier has paid what it owes and has flushed what was put before."""
        self._check_open()
        errors = [error for tier in self._tiers if (error := self._flush(tier)) is not None]
        if errors:
            raise StorageError("; ".join(map(str, errors))) from errors[0]

    def _flush(self, tier: Tier) -> StorageError | None:
        with self._lock:
            owed = list(tier.owed)
        with self._holding(owed):
            return tier.pay(owed, anyway=True) or tier.flush()

    def usage(self) -> Mapping[str, int]:
        """Sums over the tiers, in which a record counts once for each copy, and each tier's own four as
        ``tier0_records`` and so on. ``stale_tiers`` did not answer: theirs are the numbers of an earlier call."""
        self._check_open()
        total: Counter[str] = Counter(dict.fromkeys((*_FOUR, "stale_tiers"), 0))
        for depth, tier in enumerate(self._tiers):
            try:
                self._usages[depth] = dict(tier.backend.usage())
            except StorageError:
                total["stale_tiers"] += 1
            here = self._usages[depth]
            total.update({name: here[name] for name in _FOUR})
            total.update({f"tier{depth}_{name}": here[name] for name in _FOUR})
        return dict(total)

    def close(self) -> None:
        """Idempotent. :class:`StorageError`: closed, but a tier could not delete all that it owes."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        errors: list[StorageError] = []

        def close(tier: Tier) -> None:
            tier.pay(list(tier.owed), anyway=True)
            try:
                tier.backend.close()
            except StorageError as error:
                errors.append(error)
            if tier.owed:
                errors.append(StorageError(f"tier {tier.name} was closed before it got {len(tier.owed)} deletions"))

        with ExitStack() as rest:  # a tier that ends with what is no StorageError leaves no other one open
            for tier in reversed(self._tiers):
                rest.callback(close, tier)
        if errors:
            raise StorageError("; ".join(map(str, errors))) from errors[0]

    def _check_open(self) -> None:
        if os.getpid() != self._pid:  # before any lock, which another thread may have held at the fork
            raise StoreClosedError("the tiered store was opened before fork; open one in a spawned process")
        if self._closed:
            raise StoreClosedError("the tiered store is closed")

    @contextmanager
    def _holding(self, keys: Collection[BlockKey], *, free: bool = False) -> Iterator[set[BlockKey]]:
        """No other call changes these keys meanwhile. ``free``: only those that no other call changes now."""
        with self._lock:
            if not free:
                self._lock.wait_for(lambda: self._busy.isdisjoint(keys))
            held = set(keys) - self._busy
            self._busy |= held
        try:
            yield held
        finally:
            with self._lock:
                self._busy -= held
                self._lock.notify_all()

    @contextmanager
    def _reading(self) -> Iterator[set[BlockKey]]:
        """The keys that are stored or deleted while it lasts: what was read of them may be out of date."""
        changed: set[BlockKey] = set()
        with self._lock:
            self._readings.append(changed)
        try:
            yield changed
        finally:
            with self._lock:
                self._readings = [other for other in self._readings if other is not changed]

    def _shows(self, tier: Tier, key: BlockKey) -> bool:
        """The lock is held."""
        return key not in tier.owed and key not in self._hidden

    def _tell_readings(self, keys: Collection[BlockKey]) -> None:
        """The lock is held."""
        for changed in self._readings:
            changed.update(keys)

    def _pay_some(self, tier: Tier, mine: Collection[BlockKey]) -> StorageError | None:
        """Pay what a tier owes of the keys that the caller holds, and some of the others that nobody holds."""
        with self._lock:
            if not tier.owed:
                return None
            others = [key for key, _ in zip(tier.owed, range(PAID_MAX), strict=False) if key not in mine]
        with self._holding(others, free=True) as free:
            return tier.pay([*mine, *free])

    def _ask(
        self,
        tier: Tier,
        wanted: Sequence[int],
        keys: Sequence[BlockKey],
        buffers: Sequence[memoryview],
        found: list[RecordHeader | Absence],
        bad: set[int],
    ) -> StorageError | None:
        """Fill in the sound records that a tier has of ``wanted``; the numbers of its bad ones are added to ``bad``."""
        with self._lock:
            asked = [i for i in wanted if self._shows(tier, keys[i])]
        if not asked:
            return None
        names = [keys[i] for i in asked]
        answers = tier.read(names, lambda: tier.backend.get_into(names, [buffers[i] for i in asked]))
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
            with self._lock:
                tier.counts["corrupt"] += len(here)
                tier.owe(keys[i] for i in here)
            self._pay_some(tier, ())
        return None

    def _promote(
        self,
        tiers: Sequence[Tier],
        hits: Sequence[int],
        keys: Sequence[BlockKey],
        buffers: Sequence[memoryview],
        found: Sequence[RecordHeader | Absence],
        changed: Collection[BlockKey],
    ) -> None:
        """Put what was hit into the tiers in front, from the caller's buffers; not what has changed meanwhile."""
        with self._holding([keys[i] for i in hits], free=True) as free:
            records = {
                keys[i]: (header, buffers[i].cast("B"))
                for i in hits
                if keys[i] in free and keys[i] not in changed and isinstance(header := found[i], RecordHeader)
            }
            for tier in tiers:
                for replace in (True, False):  # an older one that the tier owes gives way; any other one stays
                    with self._lock:
                        part = [record for key, record in records.items() if (key in tier.owed) is replace]
                    if part:
                        with suppress(RecordError):
                            tier.put(part, "promoted", replace=replace)


def _is_same(stored: RecordHeader, offered: RecordHeader) -> bool:
    return covers(stored, offered) and covers(offered, stored)


def _no_tier(errors: Sequence[StorageError]) -> StorageError:
    """What to raise when no tier answered; its message has every cause."""
    kind = StoreUnavailableError if any(isinstance(e, StoreUnavailableError) for e in errors) else StorageError
    error = kind("no tier answered: " + "; ".join(map(str, errors)))
    error.__cause__ = errors[0]
    return error


__all__ = ["TieredStore"]
