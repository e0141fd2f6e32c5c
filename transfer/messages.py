"""The messages between prefill (P) and decode (D): a fixed prefix, then one MessagePack array.

The prefix is checked before anything is decoded, every length has a limit, and bytes that are not a message raise
:class:`RemoteProtocolError` and nothing else. ``docs/protocol.md`` has the byte table. Pure: bytes in, values out.

In both directions ``boot_id`` is that of D's run: a message from it, or to it. ``lease_ms``: after how many silent
milliseconds P gives a transfer up.

Payloads of records travel in bulk frames beside it, small ones copied together, because a frame costs more than a copy.
The law: frames hold only whole payloads, in the order of the entries. As many frames as entries means one payload each.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import groupby
from typing import Annotated, Final, NewType

import msgspec
from msgspec import Meta

from cache_manager.keys import KEY_NBYTES
from cache_manager.record import HEADER_NBYTES_MAX, HEADER_NBYTES_MIN, Buffer, nbytes_of
from transfer.errors import RemoteProtocolError

MAGIC: Final = b"KVRT"
MAJOR: Final = 4
"""Peers of different majors do not understand each other; fields that are appended to a message's array are skipped."""

PREFIX: Final = struct.Struct("<4sBBH")  # magic, major, kind, reserved
CONTROL_NBYTES_MAX: Final = 1 << 20
PARTS_MAX: Final = 8
BLOCKS_MAX: Final = 16_384
"""Blocks of one transfer: a million tokens in blocks of 64."""

RECORD_NBYTES_MAX: Final = 256 << 20
"""Bytes of a record's payload; no bulk frame is larger."""

JOINED_NBYTES_MAX: Final = 128 << 10
"""Payloads up to this size are copied together; larger ones are sent without a copy."""

ENTRIES_MAX: Final = 1024
"""Records of one message."""

FIELDS_MAX: Final = 32
MODEL_MAX: Final = 1024
"""Characters of a model's name."""

TransferId = NewType("TransferId", bytes)
"""16 random bytes, drawn by the prefill side for one request; see :func:`~transfer.node.new_transfer`."""

RecordPlace = tuple[int, int]
"""(part, index): which part of which block of a transfer."""

BootId = NewType("BootId", bytes)
"""16 random bytes, drawn when a process starts: a restarted peer has another one."""

_Id = Annotated[bytes, Meta(min_length=16, max_length=16)]
_Transfer = Annotated[TransferId, Meta(min_length=16, max_length=16)]
_Version = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Name = Annotated[str, Meta(max_length=64)]
_Value = Annotated[str, Meta(max_length=512)]
_Index = Annotated[int, Meta(ge=0, lt=BLOCKS_MAX)]
_PartIndex = Annotated[int, Meta(ge=0, lt=PARTS_MAX)]
_Epoch = Annotated[int, Meta(ge=1, lt=1 << 31)]
_Milliseconds = Annotated[int, Meta(ge=1, lt=1 << 31)]
_Text = Annotated[str, Meta(max_length=256)]
_Header = Annotated[bytes, Meta(min_length=HEADER_NBYTES_MIN, max_length=HEADER_NBYTES_MAX)]


class Outcome(Enum):
    """How an offer ended; the last two: it never existed, or it belongs to another peer."""

    ACKED = "acked"
    ABORTED = "aborted"
    EXPIRED = "expired"
    RESET = "reset"
    UNKNOWN = "unknown"
    FOREIGN = "foreign"


class Part(msgspec.Struct, frozen=True, array_like=True):
    """One kind of record that every block has: peers exchange blocks only when their parts are equal.

    ``nbytes`` is the size of one record's payload, ``fingerprint`` that of its layout. ``replicated``: every rank of a
    model has the same records. ``fields`` is the fingerprint's input in words, for refusals.
    """

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    fingerprint: _Id
    nbytes: Annotated[int, Meta(ge=1, le=RECORD_NBYTES_MAX)]
    block_tokens: Annotated[int, Meta(ge=1, le=65_536)]
    replicated: bool = False
    fields: Annotated[dict[_Name, _Value], Meta(max_length=FIELDS_MAX)] = {}


class Space(msgspec.Struct, frozen=True, array_like=True):
    """A peer's :class:`~cache_manager.keys.Namespace`; ``salt`` is a digest, because a salt may be a secret."""

    model: Annotated[str, Meta(max_length=MODEL_MAX)]
    weights_version: _Version
    salt: _Id
    rank: _Version
    world: _Version


class Range(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Neighbouring blocks of the request that D wants, from ``start`` on; ``keys`` are theirs, 32 bytes each.

    Bit ``i`` of ``parts`` asks for their records of part ``i``.
    """

    start: _Index
    parts: Annotated[int, Meta(ge=1, lt=1 << PARTS_MAX)]
    keys: Annotated[bytes, Meta(min_length=KEY_NBYTES, max_length=KEY_NBYTES * BLOCKS_MAX)]


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One record of a :class:`Records`: its packed header; the payload is in the bulk, at the same index."""

    part: _PartIndex
    index: _Index
    header: _Header


class Place(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A :data:`RecordPlace` on the wire."""

    part: _PartIndex
    index: _Index


_Parts = Annotated[list[Part], Meta(min_length=1, max_length=PARTS_MAX)]


class Refuse(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """P's answer to a pull of another identity: its own in words, so that D can name the field that differs."""

    boot_id: _Id
    transfer: _Transfer
    namespace: Space
    parts: _Parts


class Pull(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """D's attempt number ``epoch`` for what it still wants. ``identity`` is the digest of D's namespace and parts."""

    boot_id: _Id
    transfer: _Transfer
    epoch: _Epoch
    identity: _Id
    wanted: Annotated[list[Range], Meta(max_length=BLOCKS_MAX)]


class Renew(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """D is still there and still wants the transfer."""

    boot_id: _Id
    transfer: _Transfer


class Ack(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """D will ask for nothing more: every record is in place or given up."""

    boot_id: _Id
    transfer: _Transfer


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=5, gc=False):
    """D gives the transfer up."""

    boot_id: _Id
    transfer: _Transfer
    reason: _Text


class Records(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Records of a transfer; their payloads, in order, are in the bulk frames: one or several whole ones per frame."""

    boot_id: _Id
    transfer: _Transfer
    epoch: _Epoch
    lease_ms: _Milliseconds
    entries: Annotated[list[Entry], Meta(min_length=1, max_length=ENTRIES_MAX)]


class Absent(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Wanted records that P does not have, or has under another key."""

    boot_id: _Id
    transfer: _Transfer
    epoch: _Epoch
    entries: Annotated[list[Place], Meta(min_length=1, max_length=PARTS_MAX * BLOCKS_MAX)]


class Gone(msgspec.Struct, frozen=True, array_like=True, tag=8, gc=False):
    """P has ended this transfer, or never had it; also its answer to an :class:`Ack`."""

    boot_id: _Id
    transfer: _Transfer
    outcome: Outcome


class Bye(msgspec.Struct, frozen=True, array_like=True, tag=9, gc=False):
    """D's run ends, and all its transfers with it."""

    boot_id: _Id


class Later(msgspec.Struct, frozen=True, array_like=True, tag=10, gc=False):
    """P may have more of the wanted records later: they are still to be offered, or to be computed."""

    boot_id: _Id
    transfer: _Transfer
    epoch: _Epoch
    lease_ms: _Milliseconds


OfTransfer = Pull | Renew | Ack | Abort
ToOffers = OfTransfer | Bye
ToPulls = Refuse | Records | Absent | Gone | Later
Message = ToOffers | ToPulls
TO_OFFERS: Final = (Pull, Renew, Ack, Abort, Bye)  # a tuple: `isinstance` of a union takes ten times as long

KINDS: Final[tuple[type[Message], ...]] = (Refuse, Pull, Renew, Ack, Abort, Records, Absent, Gone, Bye, Later)
_PREFIXES: Final = {kind: PREFIX.pack(MAGIC, MAJOR, kind.__struct_config__.tag, 0) for kind in KINDS}
_DECODERS: Final = {_PREFIXES[kind]: msgspec.msgpack.Decoder(kind).decode for kind in KINDS}
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """The control frame of ``message``; an ``AssertionError`` if it is larger than a peer takes."""
    frame = _PREFIXES[type(message)] + _encoder.encode(message)
    assert len(frame) <= CONTROL_NBYTES_MAX, f"a {type(message).__name__} of {len(frame)} bytes"
    return frame


def decode(frame: Buffer) -> Message:
    """The message in a control frame, or :class:`RemoteProtocolError`, whatever the bytes are."""
    nbytes = len(frame) if isinstance(frame, bytes) else nbytes_of(frame)
    if not PREFIX.size < nbytes <= CONTROL_NBYTES_MAX:
        raise RemoteProtocolError(f"frame: wanted {PREFIX.size + 1} to {CONTROL_NBYTES_MAX} bytes, got {nbytes}")
    raw = bytes(frame)  # slices of bytes are cheaper than views
    body_of = _DECODERS.get(raw[: PREFIX.size])
    if body_of is None:
        magic, major, kind, reserved = PREFIX.unpack_from(raw)
        if magic != MAGIC:
            raise RemoteProtocolError(f"magic: wanted {MAGIC!r}, got {magic!r}")
        if major != MAJOR:
            raise RemoteProtocolError(f"protocol: wanted {MAJOR}, got {major}")
        raise RemoteProtocolError(f"kind, reserved: wanted a known kind and 0, got {kind}, {reserved}")
    try:
        message: Message = body_of(raw[PREFIX.size :])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"body of kind {raw[5]}: {error}") from error
    return message


def join(payloads: Sequence[Buffer], together: Callable[[Sequence[Buffer]], Buffer] = b"".join) -> tuple[Buffer, ...]:
    """The frames for ``payloads``: small neighbours share one, which is a copy by ``together`` unless it is of one."""
    if len(payloads) == 1:
        return tuple(payloads)
    frames: list[Buffer] = []
    for small, run in groupby(payloads, lambda payload: nbytes_of(payload) <= JOINED_NBYTES_MAX):
        neighbours = list(run)
        if small and len(neighbours) > 1:
            frames.append(together(neighbours))
        else:
            frames += neighbours
    return tuple(frames)


def split(frames: Sequence[memoryview], nbytes: Sequence[int]) -> Sequence[memoryview]:
    """Views of the payloads in ``frames``, which must have the sizes ``nbytes``, all positive.

    :class:`RemoteProtocolError` unless frames end where payloads do. With one frame for each, the caller checks sizes:
    then a wrong one spoils no other.
    """
    if len(frames) == len(nbytes):
        return frames
    payloads: list[memoryview] = []
    for frame in frames:
        start = 0
        while start < frame.nbytes:
            if len(payloads) == len(nbytes):
                raise RemoteProtocolError(f"bulk: wanted {len(nbytes)} payloads, got more")
            end = start + nbytes[len(payloads)]
            if end > frame.nbytes:
                raise RemoteProtocolError(f"bulk: wanted whole payloads in a frame, got {frame.nbytes} bytes")
            payloads.append(frame[start:end])
            start = end
    if len(payloads) != len(nbytes):
        raise RemoteProtocolError(f"bulk: wanted {len(nbytes)} payloads, got {len(payloads)}")
    return payloads
