"""Which keys a store of rows has, for a thread that must not wait for a store that hangs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, wait
from functools import partial

import kvroute
from cache_manager.errors import KVRouteError
from cache_manager.keys import BlockKey
from cache_manager.ports import StorageBackend
from kvroute.connector.behind import Behind
from kvroute.connector.limits import LIMITS, Limits

logger = logging.getLogger(__name__)


class StoreReader:
    """A reader of the store at ``url``, opened and asked on a thread of its own.

    One that cannot be opened at first, or not within ``limits.open_s``, is opened with a later question.
    A store that fails, or that does not answer within ``limits.question_s``, has none of the keys. Until it has
    answered that question it is asked no further one, and has no keys: it holds the calling thread once.
    """

    def __init__(self, url: str, limits: Limits = LIMITS) -> None:
        self._url = url
        self._limits = limits
        self._store: StorageBackend | None = None
        self._thread = Behind("kvroute-reader")
        self._asked = Future[list[bool]]()  # the last question
        self._ask([], self._asked)
        wait([self._asked], limits.open_s)

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether the store has each of ``keys``."""
        try:
            if self._asked.done():
                self._asked = Future()
                self._ask(keys, self._asked)
                return self._asked.result(self._limits.question_s)
        except TimeoutError:
            logger.warning(
                "hits from outside are computed again, the store of rows has not answered for %s s",
                self._limits.question_s,
            )
        except Exception as error:  # noqa: BLE001 - of whatever store: the scheduling thread goes on
            why = str(error) if isinstance(error, KVRouteError) else repr(error)
            logger.warning("hits from outside are computed again, the store of rows cannot be asked: %s", why)
        return [False] * len(keys)

    def close(self) -> None:
        """Close the reader. A store that hangs is left to its thread, which ends with the process."""
        self._thread.put(self._close)
        self._thread.close(self._limits.question_s)

    def _ask(self, keys: Sequence[BlockKey], answer: Future[list[bool]]) -> None:
        self._thread.put(partial(self._answer, keys, answer))

    # ---------------------------------------------------------------- the thread

    def _answer(self, keys: Sequence[BlockKey], answer: Future[list[bool]]) -> None:
        try:
            if self._store is None:
                self._store = kvroute.open_store(self._url)
            answer.set_result(self._store.contains(keys))
        except BaseException as error:  # noqa: BLE001 - who asked gets it
            answer.set_exception(error)

    def _close(self) -> None:
        if self._store is not None:
            self._store.close()


__all__ = ["StoreReader"]
