"""What becomes of an engine's mistakes: dropped, counted, logged once a kind; or raised, in a strict set."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from cache_manager.bits import Ints
from cache_manager.errors import BlockBusyError, InvalidInputError, KVRouteError
from cache_manager.lock import Lock

logger = logging.getLogger(__name__)

NAMED_MAX: Final = 8  # blocks that one error names


class Mistakes:
    """The part of a set of blocks that is told of mistakes."""

    def __init__(self, lock: Lock, *, strict: bool) -> None:
        self.strict, self._lock = strict, lock
        self._logged: set[str] = set()

    def dropped(self, counter: str, n: int, call: str, error: KVRouteError, *, mistake: bool = True) -> None:
        """So many things were dropped for ``error``: count them, and log the first of the kind; a strict set raises
        what was somebody's ``mistake``."""
        if self.strict and mistake:
            raise error
        with self._lock:
            self._drop(counter, n, f"{call}: {error}")

    def _lost(self, counter: str, n: int, why: str, lose: Callable[[], None]) -> None:
        """The engine has done all the same what was refused here: ``lose`` what has no rows any more, and count."""
        try:
            with self._lock:
                lose()
                self._drop(counter, n, why)
        except BlockBusyError:
            self._lock.torn += 1  # in the middle of a call of our own: the next one forgets everything
            raise

    def _bad(self, counter: str, bad: Ints, call: str, wanted: str) -> None:
        """The same for blocks, by mistake; the lock is held."""
        named = ", ".join(map(str, bad[:NAMED_MAX].tolist()))
        more = f" and {bad.size - NAMED_MAX} more" if bad.size > NAMED_MAX else ""
        error = InvalidInputError(call, wanted, f"{'block' if bad.size == 1 else 'blocks'} {named}{more}")
        if self.strict:
            raise error
        self._drop(counter, bad.size, str(error))

    def _drop(self, counter: str, n: int, why: str) -> None:
        self._lock.count(counter, n)
        if counter not in self._logged:
            self._logged.add(counter)
            logger.warning("%s; %d dropped, further ones are counted as %s", why, n, counter)
