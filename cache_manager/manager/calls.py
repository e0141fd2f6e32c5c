"""Calls of a block manager, and what an exception in the middle of one does.

A refusal, which is a :class:`KVRouteError`, has changed nothing. Anything else may have come anywhere, as from a signal
handler: then nothing that the manager knows is sure. The next call begins anew, without a sequence and with nothing
cached, so that no block has the content of another sequence.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from enum import IntEnum
from functools import wraps
from typing import Any, Final, TypeVar, cast

from cache_manager.errors import BlockBusyError, KVRouteError
from cache_manager.lock import BUSY

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


class State(IntEnum):
    """Of a manager's calls."""

    WHOLE = 0
    RUNNING = 1
    TORN = 2


WHOLE: Final = State.WHOLE
RUNNING: Final = State.RUNNING


class Calls:
    """Whether a call runs, and whether one was interrupted: the next one calls ``begin_anew`` first, which returns how
    many sequences have ended. ``counts`` are the manager's."""

    __slots__ = ("_begin_anew", "_counts", "state", "undone")

    def __init__(self, begin_anew: Callable[[], int], counts: Counter[str]) -> None:
        self._begin_anew = begin_anew
        self._counts = counts
        self.state = WHOLE
        self.undone = False
        """Set by code that has undone its own half-done work before an error passes on: the manager need not begin
        anew."""

    def check(self) -> None:
        """What the manager knows is whole, or made anew. ``BlockBusyError`` in the middle of one of its calls."""
        if self.state is RUNNING:
            raise BlockBusyError("manager", BUSY, "one of a finaliser or a signal handler, to be tried again later")
        if self.state is State.TORN:
            ended = self._begin_anew()
            self._counts["interrupted_calls"] += 1
            logger.warning("a call was interrupted in the middle: all %d sequences have ended", ended)
            self.state = WHOLE


def whole(method: F) -> F:
    """Mark a method that changes what a manager knows: it ends well, or is refused, or the next one begins anew.

    Of an object with ``calls``. A method that is not marked calls :meth:`Calls.check` and makes one change at most;
    only what has been counted is known without.
    """

    @wraps(method)
    def marked(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls: Calls = self.calls
        if calls.state is not WHOLE:
            calls.check()
        calls.state = RUNNING
        try:
            answer = method(self, *args, **kwargs)
        except BaseException as error:
            undone = calls.undone
            calls.undone = False
            calls.state = State.TORN
            if undone or isinstance(error, KVRouteError):
                calls.state = WHOLE
            raise
        calls.state = WHOLE
        return answer

    return cast("F", marked)
