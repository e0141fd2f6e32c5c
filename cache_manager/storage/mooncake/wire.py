"""What a store and its native client say to each other: MessagePack, one message a frame."""

from __future__ import annotations

from typing import Final

import msgspec

CALLS_MAX: Final = 3
"""Native calls at a time."""

KEYS_PER_CALL_MAX: Final = 512
"""Three calls of this many stay under 2048 transfers, which is what one peer bears."""


class SetUp(msgspec.Struct, frozen=True, tag="set_up"):
    master: str
    host: str  # by which other processes reach this one
    protocol: str
    devices: str
    segment_nbytes: int
    arena_nbytes: int


class Put(msgspec.Struct, frozen=True, tag="put"):
    names: list[str]
    offsets: list[int]
    nbytes: list[int]
    groups: list[str]  # as long as names, or empty


class Get(msgspec.Struct, frozen=True, tag="get"):
    names: list[str]
    offsets: list[int]
    nbytes: list[int]


class Head(msgspec.Struct, frozen=True, tag="head"):
    """The first ``nbytes`` of each object, which has more."""

    names: list[str]
    offsets: list[int]
    nbytes: list[int]


class Exist(msgspec.Struct, frozen=True, tag="exist"):
    names: list[str]


class Remove(msgspec.Struct, frozen=True, tag="remove"):
    """By force: a lease does not keep an object; one that is being written stays."""

    names: list[str]


class WarmUp(msgspec.Struct, frozen=True, tag="warm_up"):
    """Put, get and remove one small object; answers the first code that is not good, or 0."""

    name: str
    offset: int
    nbytes: int


class Close(msgspec.Struct, frozen=True, tag="close"):
    pass


Request = SetUp | Put | Get | Head | Exist | Remove | WarmUp | Close


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
