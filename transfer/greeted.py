"""The decode processes that have said hello to a prefill session: a bounded table. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator

from transfer.link import Peer
from transfer.messages import Hello


class Greeted:
    """What each peer said first. Of too many, the one that was silent longest and owns no transfer is forgotten."""

    def __init__(self, peers_max: int) -> None:
        self._peers_max = peers_max
        self._hellos: OrderedDict[Peer, Hello] = OrderedDict()  # the one heard last at the end
        self.owned: Counter[Peer] = Counter()  # transfers by owner, also by one that was lost; no zeros

    def __len__(self) -> int:
        return len(self._hellos)

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._hellos)

    def enter(self, peer: Peer, hello: Hello) -> bool:
        """Remember ``peer`` by ``hello``; ``False``: there is no room, as all of too many own transfers."""
        if peer not in self._hellos and len(self) >= self._peers_max:
            idle = next((known for known in self._hellos if known not in self.owned), None)
            if idle is None:
                return False
            del self._hellos[idle]
        self._hellos[peer] = hello
        self._hellos.move_to_end(peer)
        return True

    def has(self, peer: Peer, boot_id: bytes) -> bool:
        """Whether ``peer`` is remembered by a hello of the run ``boot_id``."""
        hello = self._hellos.get(peer)
        return hello is not None and hello.boot_id == boot_id

    def heard(self, peer: Peer) -> None:
        self._hellos.move_to_end(peer)

    def frame_nbytes_max(self, peer: Peer) -> int:
        """The largest bulk frame that ``peer`` takes."""
        return self._hellos[peer].frame_nbytes_max

    def own(self, peer: Peer, transfers: int) -> None:
        """``peer`` owns so many transfers more; fewer, if that is negative."""
        self.owned[peer] += transfers
        if not self.owned[peer]:
            del self.owned[peer]

    def forget(self, peer: Peer) -> None:
        """Harmless when it is not remembered."""
        self._hellos.pop(peer, None)
