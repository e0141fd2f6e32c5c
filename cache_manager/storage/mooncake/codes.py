"""What a code of the native client means. Pure. 0 or a number of bytes is a success; the names are Mooncake's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

FULL: Final = -200
INVALID: Final = -600
EXISTS: Final = -705
LOST: Final = -800
MISSES: Final = frozenset({-703, -704, -707, -712})
"""Not there, not yet there, or gone while it was read: an absence, not a failure."""
BUGS: Final = frozenset({-10, -400, INVALID, -601})
"""Arguments that the native side refuses, although the caller has checked them."""
REFUSALS: Final = frozenset({FULL, EXISTS, -706})
LATER: Final = frozenset({FULL, EXISTS})
"""A put with such a code may succeed when it is repeated."""
MASTER: Final = frozenset({-900, -901})
"""Nothing works without the master."""

NAMES: Final = {
    -1: "INTERNAL_ERROR",
    -101: "SEGMENT_NOT_FOUND",
    -103: "CLIENT_NOT_FOUND",
    FULL: "NO_AVAILABLE_HANDLE",
    -500: "WRITE_FAIL",
    INVALID: "INVALID_PARAMS",
    -704: "OBJECT_NOT_FOUND",
    EXISTS: "OBJECT_ALREADY_EXISTS",
    LOST: "TRANSFER_FAIL: the process that holds the objects does not answer",
    -900: "RPC_FAIL: the master is gone, or of another version than the client",
    -901: "RPC_TIMEOUT: the master does not answer",
}


def is_failure(code: int) -> bool:
    """The pool or one of its processes failed."""
    return code < 0 and code not in MISSES | BUGS | REFUSALS


def failure_of_call(codes: Sequence[int]) -> int:
    """The failure of a whole call, by the ``codes`` of its records: one of the master's, or one of them if all failed.
    0: it has not failed."""
    failures = [code for code in codes if is_failure(code)]
    of_master = MASTER.intersection(failures)
    if of_master:
        return max(of_master)
    return failures[0] if failures and len(failures) == len(codes) else 0


def describe(code: int) -> str:
    """A code in words.

    >>> describe(-901)
    'code -901, RPC_TIMEOUT: the master does not answer'
    """
    return ", ".join(filter(None, (f"code {code}", NAMES.get(code))))
