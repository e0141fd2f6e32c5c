"""Calls of a block manager, and what an exception in the middle of one does.

A refusal, which is a :class:`KVRouteError`, has changed nothing. Anything else may have come anywhere, as from a signal
handler: then nothing that the manager knows is sure. The next call begins anew, without a sequence and with nothing
cached, so that no block has the content of another sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from cache_manager.errors import BlockBusyError, KVRouteError
from cache_manager.lock import BUSY

F = TypeVar("F", bound=Callable[..., Any])


class Calls:
    """Whether a call runs, and whether one was interrupted."""

    def __init__(self) -> None:
        self.running = False
        self.torn = False
        self.undone = False
        """Whether what the error that is on its way has stopped is undone: the manager is in order."""

    def check_none_runs(self) -> None:
        if self.running:
            raise BlockBusyError("manager", BUSY, "one of a finaliser or a signal handler, to be tried again later")


def whole(method: F) -> F:
    """Mark a method that changes what a manager knows: it ends well, or is refused, or the next one begins anew."""

    @wraps(method)
    def marked(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.check()
        calls: Calls = self.calls
        calls.running = calls.torn = True
        calls.undone = False
        try:
            answer = method(self, *args, **kwargs)
        except BaseException as error:
            calls.torn = not (calls.undone or isinstance(error, KVRouteError))
            raise
        finally:
            calls.running = False
        calls.torn = False
        return answer

    return cast("F", marked)
