"""Pulls that came before their offers: a bounded table. Pure."""

from __future__ import annotations

from collections import OrderedDict

from transfer.link import Peer
from transfer.messages import Pull, TransferId


class EarlyPulls:
    """Each waits ``wait_s`` for its offer, however often it is said; of too many, the oldest waits no longer."""

    def __init__(self, pulls_max: int, wait_s: float) -> None:
        self._pulls_max = pulls_max
        self._wait_s = wait_s
        self._pulls: OrderedDict[TransferId, tuple[Peer, Pull, float]] = OrderedDict()  # until when; the oldest first

    def __len__(self) -> int:
        return len(self._pulls)

    def owner(self, transfer: TransferId) -> tuple[Peer, bytes] | None:
        """The peer and the run whose pull of ``transfer`` waits."""
        known = self._pulls.get(transfer)
        return None if known is None else (known[0], known[1].boot_id)

    def enter(self, peer: Peer, pull: Pull, now_s: float) -> None:
        """Have ``pull`` wait; its last saying counts, the time of its first."""
        transfer = TransferId(pull.transfer)
        known = self._pulls.get(transfer)
        self._pulls[transfer] = peer, pull, now_s + self._wait_s if known is None else known[2]

    def take(self, transfer: TransferId) -> tuple[Peer, Pull] | None:
        """The pull that waits for this offer, which waits no longer."""
        known = self._pulls.pop(transfer, None)
        return known and known[:2]

    def due_s(self) -> float | None:
        """When the oldest has waited long enough."""
        return next((until_s for _, _, until_s in self._pulls.values()), None)

    def give_up(self, now_s: float) -> list[tuple[Peer, TransferId]]:
        """Take out what has waited long enough, or is too much."""
        gone: list[tuple[Peer, TransferId]] = []
        while self._pulls and (len(self._pulls) > self._pulls_max or (self.due_s() or 0.0) <= now_s):
            transfer, (peer, _, _) = self._pulls.popitem(last=False)
            gone.append((peer, transfer))
        return gone
