"""What a session's messages travel by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from cache_manager.record import Buffer

Peer = NewType("Peer", bytes)
"""The name that the link gives the other end: never taken from a message, and kept over that peer's restart."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message that came. The views in ``bulk`` are valid until ``release`` was called, which is called once."""

    peer: Peer
    control: Buffer
    bulk: Sequence[memoryview] = ()
    release: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class PeerFound:
    """The link can reach ``peer`` from now on. A link whose peers are there from the start need not say so."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The link can no longer reach ``peer``; it may come back under the same name."""

    peer: Peer


Came = Arrival | PeerFound | PeerLost


class Link(Protocol):
    """One endpoint that carries messages; owned by one thread, but for :meth:`wake`.

    * :meth:`send` takes the whole message or answers ``False`` (full, or no such peer: nothing was sent). The link
      keeps references to the buffers of ``bulk`` until it has sent them or lost the peer; one that changes meanwhile
      arrives changed.
    * :meth:`poll` waits at most ``timeout_s`` for something to happen and answers what came, at most ``limit`` items.
    * Messages may be lost, doubled or come late as far as sessions care; they are never mixed or cut.

    Whatever a peer sends, no method raises because of it.
    """

    @property
    def address(self) -> str:
        """Where others connect to; empty when nobody can."""

    def connect(self, address: str) -> Peer:
        """The peer at ``address``, which need not be there yet; the same peer for the same address."""

    def send(self, peer: Peer, control: bytes, bulk: Sequence[Buffer] = ()) -> bool: ...

    def poll(self, timeout_s: float, limit: int = 64) -> list[Came]: ...

    def cut(self, peer: Peer) -> None:
        """Break the connection by which ``peer`` came, with what waits for it; harmless when there is none."""

    def wake(self) -> None:
        """Make :meth:`poll` return soon; the one method that any thread may call."""

    def close(self, linger_s: float = 0.5) -> None:
        """Send what can be sent in ``linger_s``, then let go of every buffer. Harmless the second time."""
