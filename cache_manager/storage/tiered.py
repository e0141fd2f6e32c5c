"""A storage backend made of others: the first tier that has a record answers, and the tiers before it get a copy.

Tiers are not kept in step. If one was away or made room, an older record of a key may answer; if a record is deleted in
the middle of its promotion, it may stay in front. Each is verified, whole, and names its origin.

No thread, no queue, no pause: a tier that is down has to fail at once, as ``mooncake:`` and ``apart:`` do.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from operator import is_
from typing import TypeVar

from cache_manager.errors import ConfigError, RecordError, StorageError, StoreUnavailableError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence, StorageBackend
from cache_manager.record import Buffer, RecordHeader
from cache_manager.storage.guard import ClosingStore, StoreLock
from cache_manager.storage.records import is_sound, one_each
from cache_manager.storage.url import StoreUrl

_T = TypeVar("_T")
Errors = dict[str, StorageError]  # by the tier's name


def open_tiered_store(url: StoreUrl) -> TieredStore:
    """``tiered:file:///dir,mooncake://HOST:PORT/PREFIX``."""
    from cache_manager.storage import open_store  # it imports this module by name

    url.allow()
    if not url.tiers:
        raise ConfigError("tiered: store tiers", "URLs, as in tiered:file:///dir,mooncake://host:port", repr(url.text))
    with ExitStack() as undo:
        tiers: dict[str, StorageBackend] = {}
        for i, text in enumerate(url.tiers):
            tiers[f"{i}:{StoreUrl.parse(text).scheme}"] = tier = open_store(text)
            undo.callback(tier.close)
        store = TieredStore(tiers)
        undo.pop_all()
    return store


class Tier:
    """One tier, and its counts."""

    def __init__(self, name: str, backend: StorageBackend) -> None:
        self.name = name
        self.backend = backend
        self.usage = backend.usage()  # its last answer
        self.counts = Counter[str]()
        self._lock = threading.RLock()  # which guards the counts; a signal handler may ask meanwhile

    def ask(self, what: str, left: Sequence[int], call: Callable[[], list[_T] | None], errors: Errors) -> dict[int, _T]:
        """The backend's answers for the positions ``left``; if it failed, none, and ``errors`` says why."""
        try:
            answers = call() if left else None
            return {} if answers is None else dict(zip(left, one_each(answers, left), strict=True))
        except StorageError as error:
            errors[self.name] = error
            self.count(**{what: len(left)})
            return {}

    def count(self, **by: int) -> None:
        with self._lock:
            self.counts.update(by)


class TieredStore(ClosingStore):
    """A ``StorageBackend`` over named tiers, asked from the first to the last. It owns and closes them.

    ``put`` writes to every tier; but if one keeps a record of another origin, that is the answer, and later tiers are
    not offered the new one. ``get_into`` asks the tiers in turn for the records still missing, verifies them, and puts
    a later tier's records into the earlier ones. :class:`StorageError` if no tier answered, and from ``delete`` and
    ``flush`` if any failed: that tier may still have the records when it works again.
    """

    def __init__(self, tiers: Mapping[str, StorageBackend]) -> None:
        if len(tiers) < 2:
            raise ConfigError("tiered: store tiers", "2 or more", len(tiers))
        self._open = StoreLock("tiered store")
        self._tiers = [Tier(name, backend) for name, backend in tiers.items()]

    def put(
        self, headers: Sequence[RecordHeader], payloads: Sequence[Buffer], *, replace: bool = False
    ) -> list[RecordHeader | None]:
        self._open.check()
        stored: list[RecordHeader | None] = [None for _ in zip(headers, payloads, strict=True)]
        left = list(range(len(headers)))
        errors = Errors()
        for tier in self._tiers:
            their_headers = [headers[i] for i in left]
            their_payloads = [payloads[i] for i in left]
            put = partial(tier.backend.put, their_headers, their_payloads, replace=replace)
            answers = tier.ask("failed_writes", left, put, errors)
            written = sum(answer is headers[i] for i, answer in answers.items())
            tier.count(written=written)
            for i, answer in answers.items():
                stored[i] = stored[i] or answer
                if answer is not None and answer.origin != headers[i].origin:
                    left.remove(i)
        _raise(errors, len(self._tiers))
        return stored

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[RecordHeader | Absence]:
        self._open.check()
        found: list[RecordHeader | Absence] = [Absence.MISS for _ in zip(keys, buffers, strict=True)]
        errors = Errors()
        for depth, tier in enumerate(self._tiers):
            left = [i for i, each in enumerate(found) if not isinstance(each, RecordHeader)]
            their_keys = [keys[i] for i in left]
            their_buffers = [buffers[i] for i in left]
            get = partial(tier.backend.get_into, their_keys, their_buffers)
            hits: dict[int, RecordHeader] = {}
            bad: list[BlockKey] = []
            for i, answer in tier.ask("failed_reads", left, get, errors).items():
                if isinstance(answer, RecordHeader) and is_sound(answer, keys[i], buffers[i]):
                    found[i] = hits[i] = answer
                elif answer is not Absence.MISS:
                    found[i] = Absence.CORRUPT
                    bad.append(keys[i])
            tier.count(hits=len(hits), corrupt=len(bad))
            if bad:  # if this fails, the copy is found bad again
                delete = partial(tier.backend.delete, bad)
                tier.ask("failed_writes", range(len(bad)), delete, {})
            self._promote(self._tiers[:depth], hits, buffers)
        _raise(errors, len(self._tiers))
        if errors:  # a tier that did not answer may have a sound copy
            found = [Absence.MISS if each is Absence.CORRUPT else each for each in found]
        return found

    def _promote(self, fronts: list[Tier], hits: dict[int, RecordHeader], buffers: Sequence[memoryview]) -> None:
        """Put records that were read into the tiers in front."""
        if not hits:
            return
        headers = list(hits.values())
        payloads = [buffers[i] for i in hits]
        for front in fronts:
            put = partial(front.backend.put, headers, payloads)
            answers = front.ask("failed_writes", range(len(hits)), put, {})
            promoted = sum(map(is_, answers.values(), headers))
            front.count(promoted=promoted)

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        self._open.check()
        there = [False] * len(keys)
        errors = Errors()
        for tier in self._tiers:
            left = [i for i, here in enumerate(there) if not here]
            contains = partial(tier.backend.contains, [keys[i] for i in left])
            for i, here in tier.ask("failed_reads", left, contains, errors).items():
                there[i] = here
        _raise(errors, len(self._tiers))
        return there

    def delete(self, keys: Sequence[BlockKey]) -> None:
        self._open.check()
        errors = Errors()
        for tier in self._tiers:
            tier.ask("failed_writes", range(len(keys)), partial(tier.backend.delete, keys), errors)
        _raise(errors)

    def flush(self) -> None:
        self._open.check()
        errors = Errors()
        for tier in self._tiers:
            tier.ask("failed_flushes", range(1), tier.backend.flush, errors)
        _raise(errors)

    def usage(self) -> Mapping[str, int]:
        """Sums over the tiers, which count every copy of a record, and each tier's own numbers, ``tier0_records`` and
        so on, with its ``hits``, ``written``, ``promoted``, ``corrupt``, ``failed_reads`` and ``failed_writes``, all in
        records. ``stale_tiers`` did not answer: their numbers are older."""
        self._open.check()
        total = Counter(stale_tiers=0)
        for depth, tier in enumerate(self._tiers):
            try:
                tier.usage = tier.backend.usage()
            except StorageError:
                total["stale_tiers"] += 1
            names = ("records", "used_nbytes", "free_nbytes", "capacity_nbytes")
            four = {name: tier.usage[name] for name in names}
            total.update(four)
            for name, number in (tier.counts | four).items():
                total[f"tier{depth}_{name}"] += number
        return total

    def close(self) -> None:
        """Idempotent. A tier that fails to close leaves no other one open."""
        with ExitStack() as rest:
            for tier in reversed(self._tiers) if self._open.close() else ():
                rest.callback(tier.backend.close)


def _raise(errors: Mapping[str, StorageError], count_min: int = 1) -> None:
    """Raise the failures of ``count_min`` tiers or more as one error; that of a record before any other."""
    if len(errors) >= count_min:
        if about := [error for error in errors.values() if isinstance(error, RecordError)]:
            raise about[0]
        kind = StoreUnavailableError if StoreUnavailableError in map(type, errors.values()) else StorageError
        raise kind("; ".join(f"tier {name}: {error}" for name, error in errors.items()))
