"""What a Mooncake link and its native engine's process say to each other: a few dozen bytes a message.

The link says START once, then any number of WRITE. The process answers READY once, then DONE for every WRITE.
"""

from __future__ import annotations

import msgspec


class Start(msgspec.Struct, frozen=True, tag="start"):
    """``registered``: whether peers may write into the arena (and, but for TCP, whether it may be read from)."""

    host: str
    protocol: str
    device: str
    arena_nbytes: int
    registered: bool


class Write(msgspec.Struct, frozen=True, tag="write"):
    """``nbytes`` of the arena, from ``offset`` on, to ``address`` in the memory of the engine at ``target``."""

    number: int
    target: str
    offset: int
    address: int
    nbytes: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """``port`` and the arena's address in that process, or why there is no engine. ``missing``: no wheel."""

    port: int = 0
    base: int = 0
    error: str = ""
    missing: bool = False


class Done(msgspec.Struct, frozen=True, tag="done"):
    """``code`` is 1 when the bytes are there, negative otherwise."""

    number: int
    code: int


encode = msgspec.msgpack.Encoder().encode
decode_asked = msgspec.msgpack.Decoder(Start | Write).decode
decode_answer = msgspec.msgpack.Decoder(Ready | Done).decode
