"""What a native result code means. Pure.

A code is 0 or a number of bytes for success, negative otherwise; the names are Mooncake's own.
"""

from __future__ import annotations

from typing import Final

FULL: Final = -200
EXISTS: Final = -705
LEASED: Final = -706
EXPIRED: Final = -707
INVALID: Final = -600

NAMES: Final = {
    -1: "INTERNAL_ERROR",
    -10: "BUFFER_OVERFLOW",
    -101: "SEGMENT_NOT_FOUND",
    -102: "SEGMENT_ALREADY_EXISTS",
    -103: "CLIENT_NOT_FOUND",
    FULL: "NO_AVAILABLE_HANDLE",
    -400: "INVALID_KEY",
    -500: "WRITE_FAIL",
    INVALID: "INVALID_PARAMS",
    -601: "ILLEGAL_CLIENT",
    -703: "REPLICA_IS_NOT_READY",
    -704: "OBJECT_NOT_FOUND",
    EXISTS: "OBJECT_ALREADY_EXISTS",
    LEASED: "OBJECT_HAS_LEASE",
    EXPIRED: "LEASE_EXPIRED",
    -712: "REPLICA_IS_GONE",
    -800: "TRANSFER_FAIL",
    -900: "RPC_FAIL",
    -901: "RPC_TIMEOUT",
}

CAUSES: Final = {
    -800: "the process that holds the objects does not answer",
    -900: "the master is gone, or of another version than the client",
    -901: "the master does not answer",
}

_MISSES: Final = frozenset({-703, -704, EXPIRED, -712})
_MASTER: Final = frozenset({-900, -901})
_BUGS: Final = frozenset({-10, -400, INVALID, -601})


def is_miss(code: int) -> bool:
    """Not there, not yet, or gone while it was read: an absence and no failure."""
    return code in _MISSES


def is_failure(code: int) -> bool:
    """The pool or one of its processes failed: what a breaker counts."""
    return code < 0 and code not in _MISSES and code not in _BUGS and code not in (FULL, EXISTS, LEASED)


def is_master_failure(code: int) -> bool:
    """Nothing works without the master: one such answer opens the breakers."""
    return code in _MASTER


def is_bug(code: int) -> bool:
    """Arguments that the native side refuses; the caller has checked them before."""
    return code in _BUGS


def describe(code: int) -> str:
    """For people.

    >>> describe(-901)
    'RPC_TIMEOUT (-901): the master does not answer'
    """
    text = f"{NAMES.get(code, 'code')} ({code})"
    return f"{text}: {CAUSES[code]}" if code in CAUSES else text
