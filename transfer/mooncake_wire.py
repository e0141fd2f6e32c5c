"""What the two ends of a Mooncake link say to each other beside the sessions' messages, and who uses which bytes. Pure.

Every control frame begins with a tag. GRANT: decode lends a window of its memory to one prefill peer. LANDED: bulk of
the message that follows lies in these ranges of the window. FREE: decode has copied it out, the ranges may be written
again.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from cache_manager.spec import align
from transfer.errors import RemoteProtocolError

PLAIN: Final = 0
GRANT: Final = 1
LANDED: Final = 2
FREE: Final = 3
WINDOW_NBYTES_MAX: Final = 1 << 36
RANGES_MAX: Final = 1024

_Life = Annotated[bytes, Meta(min_length=16, max_length=16)]
_Number = Annotated[int, Meta(ge=0, lt=1 << 62)]


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """``port`` of the engine to write to, whose host is where the connection comes from; ``life`` names the grant."""

    life: _Life
    port: Annotated[int, Meta(ge=1, le=65_535)]
    base: Annotated[int, Meta(ge=1, lt=1 << 62)]
    nbytes: Annotated[int, Meta(ge=1, le=WINDOW_NBYTES_MAX)]


class Landed(msgspec.Struct, frozen=True, array_like=True):
    life: _Life
    number: _Number
    ranges: Annotated[list[tuple[_Number, _Number]], Meta(min_length=1, max_length=RANGES_MAX)]  # (offset, bytes)


class Free(msgspec.Struct, frozen=True, array_like=True):
    life: _Life
    number: _Number


_encoder = msgspec.msgpack.Encoder()
_DECODERS: Final[dict[int, msgspec.msgpack.Decoder[Any]]] = {
    GRANT: msgspec.msgpack.Decoder(Grant),
    LANDED: msgspec.msgpack.Decoder(Landed),
    FREE: msgspec.msgpack.Decoder(Free),
}
_TAGS: Final = {Grant: GRANT, Landed: LANDED, Free: FREE}


def encode(message: Grant | Landed | Free) -> bytes:
    return bytes((_TAGS[type(message)],)) + _encoder.encode(message)


def decode(frame: bytes) -> Grant | Landed | Free:
    """The message in a frame that is not PLAIN; :class:`RemoteProtocolError`, whatever the bytes are."""
    decoder = _DECODERS.get(frame[0]) if frame else None
    if decoder is None:
        raise RemoteProtocolError(f"tag: wanted one of {sorted(_DECODERS)}, got {frame[:1]!r}")
    try:
        message: Grant | Landed | Free = decoder.decode(memoryview(frame)[1:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"body of tag {frame[0]}: {error}") from error
    return message


class Window:
    """The sender's view of a granted window: which ranges are taken; first fit.

    >>> window = Window(256)
    >>> window.take(1, 100), window.take(2, 100), window.take(3, 1)
    (0, 128, None)
    >>> window.give(1); window.take(3, 64)
    0
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._taken: dict[int, tuple[int, int]] = {}  # number -> (offset, end)

    def take(self, number: int, nbytes: int) -> int | None:
        """The offset of a range for message ``number``; ``None``: no room now."""
        assert number not in self._taken
        at = 0
        for offset, end in sorted(self._taken.values()):
            if offset - at >= nbytes:
                break
            at = end
        if at + nbytes > self.nbytes:
            return None
        self._taken[number] = at, at + align(nbytes)
        return at

    def give(self, number: int) -> None:
        """Take a range back; harmless when it was."""
        self._taken.pop(number, None)

    @property
    def taken(self) -> int:
        return len(self._taken)


def inside(ranges: list[tuple[int, int]], nbytes: int) -> bool:
    """Whether all ranges are within a window of ``nbytes`` and together no larger than it."""
    return all(offset + n <= nbytes for offset, n in ranges) and sum(n for _, n in ranges) <= nbytes
