"""The port that carries a session's messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NewType, Protocol

import msgspec

from cache_manager.record import Buffer

Peer = NewType("Peer", bytes)
"""The name that the link gives the other end: never taken from a message, and kept across that peer's restart."""


def _nothing() -> None: ...


class Arrival(msgspec.Struct, frozen=True):
    """A message that came. The views in ``bulk`` are valid until the one call of ``release``."""

    peer: Peer
    control: Buffer
    bulk: Sequence[memoryview] = ()
    release: Callable[[], None] = _nothing


class PeerFound(msgspec.Struct, frozen=True):
    """The link can reach ``peer`` from now on. A link whose peers are there from the start need not report it."""

    peer: Peer


class PeerLost(msgspec.Struct, frozen=True):
    """The link can no longer reach ``peer``, which it had connected to; it may come back under the same name.

    The loss of a peer that connected to us need not be reported: a send to it is refused.
    """

    peer: Peer


LinkEvent = Arrival | PeerFound | PeerLost


class Link(Protocol):
    """One endpoint that carries messages; owned by one thread, except for :meth:`wake`.

    * :meth:`send` takes the whole message or returns ``False`` (full, or no such peer: nothing was sent). The link
      keeps references to the buffers of ``bulk`` until it has sent them or lost the peer; a buffer that changes
      meanwhile arrives changed.
    * :meth:`poll` waits at most ``timeout_s`` for an event and returns what came, at most ``limit`` items.
    * Messages may be lost, duplicated or late; they are never mixed or cut.

    No message of a peer makes a method raise.
    """

    @property
    def address(self) -> str:
        """The address for other processes; empty if none can connect."""

    def connect(self, address: str) -> Peer:
        """The peer at ``address``, which need not be there yet; the same peer for the same address."""

    def send(self, peer: Peer, control: bytes, bulk: Sequence[Buffer] = ()) -> bool: ...

    def poll(self, timeout_s: float, limit: int = 64) -> list[LinkEvent]: ...

    def wake(self) -> None:
        """Make :meth:`poll` return soon; the one method that any thread may call."""

    def close(self, linger_s: float = 0.5) -> None:
        """Send what can be sent in ``linger_s``, then release every buffer. Harmless the second time."""
