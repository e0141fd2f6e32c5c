"""What a store and its native client say to each other (MessagePack, one message a frame), and what a code means. Pure.

An answer has a code a name: 0 or a number of bytes for success, negative otherwise; the names are Mooncake's own.
"""

from __future__ import annotations

from typing import Final

import msgspec

KEYS_PER_CALL_MAX: Final = 500
"""So many calls of this many stay under 2048 transfers, which is what one peer bears."""


class SetUp(msgspec.Struct, frozen=True, tag="set_up"):
    master: str
    host: str  # by which other processes reach this one
    protocol: str
    devices: str
    segment_nbytes: int
    arena_nbytes: int


class Exist(msgspec.Struct, frozen=True, tag="exist"):
    names: list[str]


class Remove(msgspec.Struct, frozen=True, tag="remove"):
    """By force: a lease does not keep an object; one that is being written stays."""

    names: list[str]


class Get(msgspec.Struct, frozen=True, tag="get"):
    names: list[str]
    offsets: list[int]
    nbytes: list[int]


class Head(Get, frozen=True, tag="head"):
    """The first ``nbytes`` of each object, which has more."""


class Put(Get, frozen=True, tag="put"):
    groups: list[str] = []  # as long as names, or empty


class Close(msgspec.Struct, frozen=True, tag="close"):
    pass


Call = Exist | Remove | Get | Head | Put
Request = SetUp | Call | Close


class Asked(msgspec.Struct, frozen=True):
    number: int
    request: Request


class Answer(msgspec.Struct, frozen=True):
    """``codes`` as the native call returned them, or what went wrong before it was made."""

    number: int
    codes: list[int]
    error: str = ""


encode = msgspec.msgpack.Encoder().encode
decode_asked = msgspec.msgpack.Decoder(Asked).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode

FULL: Final = -200
INVALID: Final = -600
EXISTS: Final = -705
EXPIRED: Final = -707
LOST: Final = -800
MISSES: Final = frozenset({-703, -704, EXPIRED, -712})
"""Not there, not yet, or gone while it was read: an absence and no failure."""
BUGS: Final = frozenset({-10, -400, INVALID, -601})
"""Arguments that the native side refuses; the caller has checked them before."""
REFUSALS: Final = frozenset({FULL, EXISTS, -706})
LATER: Final = frozenset({FULL, EXISTS})
"""Of a put: it may succeed when it is made again."""
MASTER: Final = frozenset({-900, -901})
"""Nothing works without the master: one such answer opens the breakers."""

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
    """The pool or one of its processes failed: what a breaker counts."""
    return code < 0 and code not in MISSES | BUGS | REFUSALS


def describe(code: int) -> str:
    """For people.

    >>> describe(-901)
    'code -901, RPC_TIMEOUT: the master does not answer'
    """
    return ", ".join(filter(None, (f"code {code}", NAMES.get(code))))
