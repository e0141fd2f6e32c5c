"""A storage backend made of others: the first tier that has a record answers, and the tiers before it learn of it.

Law: a key that a tier *owes* is hidden there until it is deleted there. The tier may have a record of it that was
deleted or replaced while the tier was away, or that is damaged. So no tier hands out what an answer has denied.

No thread, no queue: whoever has to go on while a slow tier is written has a job for it (:mod:`cache_manager.stored`),
which keeps the block instead of a copy. Every copy is verified, so that a bad one costs its tier that copy.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Final, Literal, TypeVar

from cache_manager.errors import ConfigError, RecordError, StorageError, StoreUnavailableError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence, StorageBackend
from cache_manager.record import Buffer, RecordHeader, check_record, covers, takes_the_place
from cache_manager.storage.batch import flat, rounds
from cache_manager.storage.guard import ClosingStore, Guard, HeldKeys
from cache_manager.storage.url import StoreUrl

OWED_MAX: Final = 262_144
"""Keys that one tier may owe; about 32 MB."""
PAID_MAX: Final = 512  # old debts of a tier that one call pays beside its own work
PAUSE_MS: Final = 500
PAUSE_MS_MAX: Final = 600_000
_T = TypeVar("_T")

Offer = tuple[RecordHeader, memoryview]
Offers = Mapping[BlockKey, Offer]
Answers = Mapping[BlockKey, RecordHeader | None]


def open_tiered_store(url: StoreUrl) -> TieredStore:
    """``tiered:file:///dir,mooncake://HOST:PORT/PREFIX``; with a parameter ``tiered:?pause_ms=100,file:///dir,…``."""
    from cache_manager.storage import open_store  # it imports this module by name

    url.allow("pause_ms")
    if not url.tiers:
        raise ConfigError("tiered: store tiers", "URLs, as in tiered:file:///dir,mooncake://host:port", repr(url.text))
    with ExitStack() as undo:
        tiers: dict[str, StorageBackend] = {}
        for i, text in enumerate(url.tiers):
            tiers[f"{i}:{StoreUrl.parse(text).scheme}"] = tier = open_store(text)
            undo.callback(tier.close)
        store = TieredStore(tiers, pause_ms=url.milliseconds("pause_ms", PAUSE_MS))
        undo.pop_all()
    return store


@dataclass(frozen=True, slots=True)
class TierCounters:
    """Of one tier; records unless it says otherwise."""

    name: str
    hits: int = 0  # keys that this tier answered
    corrupt: int = 0  # copies that failed their checks, and are deleted from this tier only
    failed_reads: int = 0  # keys of calls that failed
    failed_writes: int = 0
    bypassed_reads: int = 0  # keys that were not asked for because the tier had failed a moment ago
    bypassed_writes: int = 0
    written: int = 0  # put by a caller, and stored here
    promoted: int = 0  # read from a later tier, and stored here
    owed: int = 0  # now
    forgotten: int = 0  # debts, because there were more than OWED_MAX


class Tier:
    """One tier: its backend, when it is asked, and what it owes.

    ``lock``, which the tiers of a store share, guards all but the backend, whose calls are made without it.
    """

    def __init__(self, name: str, backend: StorageBackend, pause_s: float, lock: threading.Condition) -> None:
        self.name = name
        self.backend = backend
        self.counts: Counter[str] = Counter()
        self.owed: dict[BlockKey, None] = {}  # the oldest first
        self.usage = backend.usage()  # as it answered last
        self.away_until_s = {"reads": 0.0, "writes": 0.0}
        self._pause_s = pause_s
        self._lock = lock

    def owe(self, keys: Iterable[BlockKey]) -> None:
        """These are hidden here from now on. The lock is held."""
        self.owed |= dict.fromkeys(keys)
        while len(self.owed) > OWED_MAX:
            del self.owed[next(iter(self.owed))]
            self.counts["forgotten"] += 1

    def pay(self, keys: Iterable[BlockKey], *, anyway: bool = False) -> StorageError | None:
        """Delete what the tier owes of ``keys``, which nobody else changes meanwhile; why it could not."""
        with self._lock:
            owed = [key for key in keys if key in self.owed]
        error = self.do(len(owed), lambda: self.backend.delete(owed), anyway=anyway) if owed else None
        with self._lock:
            for key in owed if error is None else ():
                self.owed.pop(key, None)
        return error

    def close(self, errors: list[StorageError]) -> None:
        """Close the backend; what went wrong is added to ``errors``."""
        self.pay(list(self.owed), anyway=True)
        if error := self.do(0, self.backend.close, anyway=True):
            errors.append(error)
        if self.owed:
            errors.append(StorageError(f"tier {self.name} was closed before it got {len(self.owed)} deletions"))

    def do(self, keys: int, call: Callable[[], object], *, anyway: bool) -> StorageError | None:
        """A write without answers; why it failed."""
        answer = self.call("writes", keys, lambda: [call()] * keys, anyway=anyway)
        return answer if isinstance(answer, StorageError) else None

    def call(
        self, what: Literal["reads", "writes"], keys: int, call: Callable[[], list[_T]], *, anyway: bool = False
    ) -> list[_T] | StorageError:
        """The backend's answers, or why there are none. One that failed is left in peace for a while, or asked
        ``anyway``; not for a :class:`RecordError`, which is about the record."""
        if not keys and not anyway:
            return []
        with self._lock:
            if not anyway and time.monotonic() < self.away_until_s[what]:
                self.counts[f"bypassed_{what}"] += keys
                return StoreUnavailableError(f"tier {self.name} failed a moment ago and is not asked")
        error: StorageError | None = None
        try:
            answers = call()
            if len(answers) != keys:
                raise StorageError(f"tier {self.name} answered {len(answers)} of {keys} keys")
        except StorageError as failure:
            error = failure
        with self._lock:
            failed = error and not isinstance(error, RecordError)
            self.away_until_s[what] = time.monotonic() + self._pause_s if failed else 0.0
            self.counts[f"failed_{what}"] += keys if error else 0
        return error or answers


class TieredStore(ClosingStore):
    """A ``StorageBackend`` over named tiers, the one that is asked first in front. It owns and closes them.

    ``put`` returns when every tier that works has the record, or has said that it has no room. A record that any of
    them has, and that the offered one may not replace, stays, and is the answer.

    ``get_into`` asks the tiers in turn for what is still missing; what a later tier had is put into the earlier ones
    before it returns. :class:`StorageError` is raised only when no tier answered, and by ``delete`` when a tier could
    not: the key stays hidden there. A call lasts as long as the calls of the tiers, which have to bound theirs. A tier
    whose read (or write) failed is not read (or written) for ``pause_ms``.

    Debts live as long as this object: after a crash a tier that had failed may have records that were deleted or
    replaced meanwhile. For the process that opened it.
    """

    def __init__(self, tiers: Mapping[str, StorageBackend], *, pause_ms: int = PAUSE_MS) -> None:
        if len(tiers) < 2:
            raise ConfigError("tiered: store tiers", "2 or more", len(tiers))
        if not 0 < pause_ms <= PAUSE_MS_MAX:
            raise ConfigError("tiered: store parameter pause_ms", f"1 to {PAUSE_MS_MAX}", pause_ms)
        self.pause_ms = pause_ms
        self._keys = HeldKeys()  # that a call may change
        self._lock = self._keys.changed
        self._guard = Guard("tiered store", self._lock)
        self._hidden: set[BlockKey] = set()  # of these, those that are changing: in one tier and not yet in all
        self._tiers = [Tier(name, backend, pause_ms / 1e3, self._lock) for name, backend in tiers.items()]

    @property
    def counters(self) -> tuple[TierCounters, ...]:
        """Of each tier at this moment; what is read at all, :class:`RecordStore` counts."""
        with self._lock:
            return tuple(TierCounters(tier.name, owed=len(tier.owed), **tier.counts) for tier in self._tiers)

    def put(
        self, headers: Sequence[RecordHeader], payloads: Sequence[Buffer], *, replace: bool = False
    ) -> list[RecordHeader | None]:
        self._guard.check()
        records = [(header, flat(header, payload)) for header, payload in zip(headers, payloads, strict=True)]
        stored: dict[BlockKey, RecordHeader | None] = {}
        with self._keys.hold({header.key for header in headers}):
            for once in rounds(header.key for header in headers):
                stored |= self._put({headers[i].key: records[i] for i in once}, replace=replace)
        return [stored[header.key] for header in headers]

    def _put(self, todo: Offers, *, replace: bool) -> Answers:
        """What the store has of each key, which the caller holds; a key that changes is hidden until it has changed."""
        stored: dict[BlockKey, RecordHeader | None] = dict.fromkeys(todo)
        told: dict[Tier, Answers | StorageError] = {}
        new: set[BlockKey] = set()
        try:
            for tier in self._tiers:
                part = {key: record for key, record in todo.items() if _is_same(stored[key] or record[0], record[0])}
                told[tier] = answers = self._offer(tier, part, "written", replace=replace)
                if isinstance(answers, StorageError):
                    continue
                for key, answer in answers.items():
                    offered, earlier = todo[key][0], stored[key]
                    gives_way = answer and takes_the_place(offered, answer, replace=replace)  # but has not
                    if earlier is None or (answer and not _is_same(answer, offered) and not gives_way):
                        stored[key] = answer
                with self._lock:
                    new |= {key for key, answer in answers.items() if answer is todo[key][0]}
                    self._hidden |= new
            errors = [each for each in told.values() if isinstance(each, StorageError)]
            _raise(errors, "no tier answered: ", len(self._tiers))
        finally:
            with self._lock:
                for tier in self._tiers:
                    answers = told.get(tier, {})
                    tier.owe(k for k, (header, _) in todo.items() if _may_differ(answers, header, stored[k], k in new))
                self._hidden.difference_update(todo)
        for tier in self._tiers:
            tier.pay(todo)
        return stored

    def _offer(
        self, tier: Tier, records: Offers, counter: Literal["written", "promoted"], *, replace: bool = False
    ) -> Answers | StorageError:
        """Put records, whose keys the caller holds, into a tier; what it owes and cannot delete now is left out."""
        self._pay_some(tier, records)
        with self._lock:
            asked = [record for key, record in records.items() if key not in tier.owed]
        headers = [header for header, _ in asked]
        payloads: list[Buffer] = [view for _, view in asked]
        answers = tier.call("writes", len(asked), lambda: tier.backend.put(headers, payloads, replace=replace))
        if isinstance(answers, StorageError):
            return answers
        with self._lock:
            tier.counts[counter] += sum(map(is_, headers, answers))
        return dict(zip((header.key for header in headers), answers, strict=True))

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[RecordHeader | Absence]:
        self._guard.check()
        found: list[RecordHeader | Absence] = [Absence.MISS for _ in zip(keys, buffers, strict=True)]
        errors: list[StorageError] = []
        for depth, tier in enumerate(self._tiers):
            left = [i for i, header in enumerate(found) if not isinstance(header, RecordHeader)]
            hits: dict[BlockKey, Offer] = {}
            bad: list[BlockKey] = []
            sound = 0
            # Nobody changes a key until it is in front, too: what was replaced or deleted meanwhile is not put there.
            with self._keys.hold([keys[i] for i in left] if depth else (), free=True) as held:
                asked = self._shown(tier, left, keys)
                get = partial(tier.backend.get_into, [keys[i] for i in asked], [buffers[i] for i in asked])
                if isinstance(answers := tier.call("reads", len(asked), get), StorageError):
                    errors.append(answers)
                    continue
                for i, answer in zip(asked, answers, strict=True):
                    if isinstance(answer, RecordHeader) and _is_sound(answer, keys[i], buffers[i]):
                        found[i] = answer
                        sound += 1
                        if keys[i] in held:
                            hits[keys[i]] = (answer, buffers[i].cast("B"))
                    elif answer is not Absence.MISS:
                        found[i] = Absence.CORRUPT
                        bad.append(keys[i])
                for front in self._tiers[:depth]:
                    self._offer(front, hits, "promoted")
            with self._lock:
                tier.counts["hits"] += sound
                tier.counts["corrupt"] += len(bad)
                tier.owe(bad)
            self._pay_some(tier, ())
        _raise(errors, "no tier answered: ", len(self._tiers))
        if errors:  # a tier that did not answer may have a sound copy
            found = [Absence.MISS if header is Absence.CORRUPT else header for header in found]
        return found

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        self._guard.check()
        there = [False] * len(keys)
        errors: list[StorageError] = []
        for tier in self._tiers:
            left = self._shown(tier, [i for i, here in enumerate(there) if not here], keys)
            answers = tier.call("reads", len(left), partial(tier.backend.contains, [keys[i] for i in left]))
            if isinstance(answers, StorageError):
                errors.append(answers)
                continue
            for i, here in zip(left, answers, strict=True):
                there[i] = here
        _raise(errors, "no tier answered: ", len(self._tiers))
        return there

    def delete(self, keys: Sequence[BlockKey]) -> None:
        self._guard.check()
        wanted = set(keys)
        with self._keys.hold(wanted):
            with self._lock:
                if any(len(tier.owed.keys() | wanted) > OWED_MAX for tier in self._tiers):
                    raise StorageError(f"more than {OWED_MAX} deletions wait for a tier that does not work")
                for tier in self._tiers:
                    tier.owe(wanted)
            paid = [(tier.name, tier.pay(wanted, anyway=True)) for tier in self._tiers]
        errors = [StorageError(f"{name}: {error}") for name, error in paid if error]
        _raise(errors, "deleted here, and hidden until it is deleted in tier ")

    def flush(self) -> None:
        """Return when every tier has paid what it owes and has flushed what was put before."""
        self._guard.check()
        errors: list[StorageError] = []
        for tier in self._tiers:
            with self._lock:
                owed = list(tier.owed)
            with self._keys.hold(owed):
                if error := tier.pay(owed, anyway=True) or tier.do(0, tier.backend.flush, anyway=True):
                    errors.append(error)
        _raise(errors)

    def usage(self) -> Mapping[str, int]:
        """Sums over the tiers, in which a record counts once for each copy, and each tier's own four as
        ``tier0_records`` and so on. ``stale_tiers`` did not answer: theirs are the numbers of an earlier call."""
        self._guard.check()
        total = Counter(stale_tiers=0)
        for depth, tier in enumerate(self._tiers):
            try:
                tier.usage = tier.backend.usage()
            except StorageError:
                total["stale_tiers"] += 1
            for name in ("records", "used_nbytes", "free_nbytes", "capacity_nbytes"):
                total[name] += tier.usage[name]
                total[f"tier{depth}_{name}"] = tier.usage[name]
        return dict(total)

    def close(self) -> None:
        """Idempotent. :class:`StorageError`: closed, but a tier could not delete all that it owes."""
        if not self._guard.close():
            return
        errors: list[StorageError] = []
        with ExitStack() as rest:  # a tier that ends with what is no StorageError leaves no other one open
            for tier in reversed(self._tiers):
                rest.callback(tier.close, errors)
        _raise(errors)

    def _shown(self, tier: Tier, wanted: Iterable[int], keys: Sequence[BlockKey]) -> list[int]:
        """Of the keys numbered ``wanted``, those that may be read from a tier."""
        with self._lock:
            return [i for i in wanted if keys[i] not in tier.owed and keys[i] not in self._hidden]

    def _pay_some(self, tier: Tier, mine: Collection[BlockKey]) -> None:
        """Pay what a tier owes of the keys that the caller holds, and some of the others that nobody holds."""
        with self._lock:
            if not tier.owed:
                return
            others = [key for key, _ in zip(tier.owed, range(PAID_MAX), strict=False) if key not in mine]
        with self._keys.hold(others, free=True) as free:
            tier.pay([*mine, *free])


def _is_sound(header: RecordHeader, key: BlockKey, payload: memoryview) -> bool:
    try:
        check_record(header, key, header.fingerprint, payload)
    except RecordError:
        return False
    return True


def _is_same(stored: RecordHeader, offered: RecordHeader) -> bool:
    return covers(stored, offered) and covers(offered, stored)


def _may_differ(
    answers: Answers | StorageError, offered: RecordHeader, stored: RecordHeader | None, is_new: bool
) -> bool:
    """Whether a tier, after these answers to a put, may have another record than ``stored``, which the store has."""
    if isinstance(answers, StorageError):  # who was not asked got nothing
        tried = not isinstance(answers, StoreUnavailableError)
        return is_new or (tried and not (stored and _is_same(stored, offered)))
    answer = answers.get(offered.key)
    return not _is_same(answer, stored) if answer and stored else is_new and offered.key not in answers


def _raise(errors: Sequence[StorageError], before: str = "", count_min: int = 1) -> None:
    """Raise what went wrong as one, if it is so much; nobody is to be asked soon where one says so."""
    if len(errors) >= count_min:
        if isinstance(errors[0], RecordError):
            raise errors[0]
        kind = StoreUnavailableError if any(isinstance(e, StoreUnavailableError) for e in errors) else StorageError
        raise kind(before + "; ".join(map(str, errors))) from errors[0]


__all__ = ["TierCounters", "TieredStore", "open_tiered_store"]
