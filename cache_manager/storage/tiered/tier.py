"""One tier of a tiered store: the backend, when it is asked, and what it owes.

Law: a key that a tier *owes* is hidden there. The tier may have a record of it that was deleted or replaced while the
tier was away, or that is damaged. A debt is paid by a deletion, or by a put after which the tier has the record that
was put. So no tier hands out what an answer of the store has denied.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from cache_manager.errors import ConfigError, RecordError, StorageError, StoreClosedError, StoreUnavailableError
from cache_manager.keys import BlockKey
from cache_manager.ports import StorageBackend
from cache_manager.record import Buffer, RecordHeader, covers
from cache_manager.storage.breaker import Breaker
from cache_manager.storage.url import StoreUrl

OWED_MAX: Final = 262_144
"""Keys that one tier may owe; about 32 MB."""
DURATION_MS_MAX: Final = 600_000

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class TieredSettings:
    """``failures_max`` failing calls in a row open a tier's breaker, for ``pause_ms`` at first."""

    pause_ms: int = 500
    pause_max_ms: int = 10_000
    failures_max: int = 3

    def __post_init__(self) -> None:
        for name in ("pause_ms", "pause_max_ms"):
            if not 0 < getattr(self, name) <= DURATION_MS_MAX:
                raise ConfigError(f"tiered: store parameter {name}", f"1 to {DURATION_MS_MAX}", getattr(self, name))
        if self.failures_max < 1:
            raise ConfigError("tiered: failures_max", "at least 1", self.failures_max)

    @classmethod
    def from_url(cls, url: StoreUrl) -> TieredSettings:
        """The parameters between ``tiered:`` and the first tier."""
        url.allow("pause_ms", "pause_max_ms")
        for name, text in url.parameters.items():
            if not (text.isascii() and text.isdecimal()):
                raise ConfigError(f"tiered: store parameter {name}", "whole milliseconds", repr(text))
        return cls(**{name: int(text) for name, text in url.parameters.items()})


@dataclass(frozen=True, slots=True)
class TierCounters:
    """Of one tier; records unless it says otherwise."""

    name: str
    hits: int = 0  # keys that this tier answered
    corrupt: int = 0  # copies that failed their checks, and are deleted from this tier only
    failed_reads: int = 0  # keys of calls that failed
    failed_writes: int = 0
    bypassed_reads: int = 0  # keys that were not asked for because the breaker was open
    bypassed_writes: int = 0
    written: int = 0  # put by a caller, and stored here
    promoted: int = 0  # read from a later tier, and stored here
    refused: int = 0  # this tier has no room for, or keeps another record than
    deleted: int = 0  # debts that were paid by a deletion
    owed: int = 0  # now
    forgotten: int = 0  # debts, because there were more than OWED_MAX
    read_openings: int = 0  # of the breaker
    write_openings: int = 0


@dataclass(frozen=True, slots=True)
class TieredCounters:
    """``asked = sum of the tiers' hits + misses + corrupt + failed``, always; keys of ``get_into``."""

    asked: int
    misses: int
    incomplete_misses: int  # of these, those that a tier was not able to answer
    corrupt: int  # no tier had a sound copy, and one had a bad one
    failed: int  # of calls that raised, because no tier answered
    tiers: tuple[TierCounters, ...]


class Tier:
    """See the module's law. ``lock``, which the tiers of a store share, guards all but the backend, whose calls are
    made without it. ``held`` in a docstring: the caller holds it.
    """

    def __init__(self, name: str, backend: StorageBackend, settings: TieredSettings, lock: threading.Condition) -> None:
        self.name = name
        self.backend = backend
        self.counts: Counter[str] = Counter()
        self.owed: dict[BlockKey, None] = {}  # the oldest first
        self.reads, self.writes = (
            Breaker(settings.failures_max, settings.pause_ms / 1e3, settings.pause_max_ms / 1e3) for _ in range(2)
        )
        self._lock = lock

    def counters(self) -> TierCounters:
        """Held."""
        return TierCounters(
            name=self.name,
            owed=len(self.owed),
            read_openings=self.reads.opened,
            write_openings=self.writes.opened,
            **self.counts,
        )

    def owe(self, keys: Iterable[BlockKey]) -> None:
        """These are hidden here from now on. Held."""
        for key in keys:
            self.owed[key] = None
        while len(self.owed) > OWED_MAX:
            del self.owed[next(iter(self.owed))]
            self.counts["forgotten"] += 1

    def read(self, keys: Sequence[BlockKey], call: Callable[[], list[_T]]) -> list[_T] | StorageError:
        """The backend's answers for ``keys``, or why there are none."""
        return self._judged(self.reads, "reads", len(keys), call)

    def put(
        self, records: Sequence[tuple[RecordHeader, memoryview]], counter: str, *, replace: bool
    ) -> dict[BlockKey, RecordHeader | None] | StorageError:
        """Put records of distinct keys; the answers, by key. :class:`RecordError` is the caller's mistake.

        What the tier has then, it does not owe any more.
        """
        headers = [header for header, _ in records]
        payloads: list[Buffer] = [view for _, view in records]

        def call() -> list[RecordHeader | None]:
            return self.backend.put(headers, payloads, replace=replace)

        found = self._judged(self.writes, "writes", len(headers), call)
        if isinstance(found, StorageError):
            return found
        with self._lock:
            for header, answer in zip(headers, found, strict=True):
                good = answer is not None and covers(answer, header)
                if answer is header:
                    self.counts[counter] += 1
                elif answer is None or (replace and not good):
                    self.counts["refused"] += 1
                if good or answer is None:  # it has this one, or nothing
                    self.owed.pop(header.key, None)
        return dict(zip([header.key for header in headers], found, strict=True))

    def pay(self, keys: Collection[BlockKey], *, anyway: bool = False) -> StorageError | None:
        """Delete what the tier owes of ``keys``, which nobody else changes meanwhile; why it could not.

        ``anyway``: also while the breaker is open.
        """
        with self._lock:
            owed = [key for key in keys if key in self.owed]
        if not owed:
            return None

        def call() -> list[None]:
            self.backend.delete(owed)
            return [None] * len(owed)

        answer = self._judged(self.writes, "writes", len(owed), call, anyway=anyway)
        if isinstance(answer, StorageError):
            return answer
        with self._lock:
            for key in owed:
                self.owed.pop(key, None)
            self.counts["deleted"] += len(owed)
        return None

    def flush(self) -> StorageError | None:
        """Flush the backend, whatever its breaker says; why it was not."""

        def call() -> list[None]:
            self.backend.flush()
            return []

        answer = self._judged(self.writes, "writes", 0, call, anyway=True)
        return answer if isinstance(answer, StorageError) else None

    def _judged(
        self, breaker: Breaker, what: str, keys: int, call: Callable[[], list[_T]], *, anyway: bool = False
    ) -> list[_T] | StorageError:
        """Make a call, or not while the breaker is open; the first one after its pause is its probe."""
        with self._lock:
            probe = breaker.due(time.monotonic())
            if not (probe or breaker.closed or anyway):
                self.counts[f"bypassed_{what}"] += keys
                return StoreUnavailableError(f"tier {self.name} is not asked: {breaker.cause}")
            if probe:
                breaker.begin_probe()
        failure: BaseException | None = None
        try:
            answers = call()
            if len(answers) != keys:
                raise StorageError(f"tier {self.name} answered {len(answers)} of {keys} keys")
        except RecordError:  # the tier has answered
            raise
        except StorageError as error:
            failure = error
            return error
        except BaseException as error:
            failure = error
            raise
        else:
            return answers
        finally:
            with self._lock:
                now_s = time.monotonic()
                if probe:
                    breaker.end_probe(now_s, good=failure is None, cause=str(failure))
                elif failure is None:
                    breaker.succeeded()
                else:
                    fatal = isinstance(failure, StoreUnavailableError | StoreClosedError)
                    breaker.failed(now_s, str(failure), fatal=fatal)
                if failure is not None:
                    self.counts[f"failed_{what}"] += keys


__all__ = ["OWED_MAX", "Tier", "TierCounters", "TieredCounters", "TieredSettings"]
