"""A prefill and a decode node over real sockets in one process, and waiting for their notices."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from transfer_rows import CanarySink, identity_of, offered, wanted
from waiting import GIVE_UP_S

from transfer.actions import Finished, Release
from transfer.identity import Identity
from transfer.limits import TransferLimits
from transfer.messages import TransferId
from transfer.node import Node, new_transfer
from transfer.zmq_link import ZmqLink
from transfer.zmq_settings import ZmqSettings

PATIENCE_S = GIVE_UP_S
_T = TypeVar("_T")
QUICK = TransferLimits(lease_s=60.0, retry_s=0.2, retries_max=300)
"""Lost messages are asked for again soon; a machine that stands still ends no pull and no lease."""
HASTY = TransferLimits(lease_s=60.0, retry_s=0.2, retries_max=3)
"""For pulls that nobody answers."""


@contextlib.contextmanager
def nodes(
    directory: Path,
    limits: TransferLimits = QUICK,
    p_limits: TransferLimits | None = None,
    identities: tuple[Identity, Identity] | None = None,
) -> Iterator[tuple[Node, Node]]:
    link = ZmqLink(ZmqSettings(bind=f"ipc://{directory}/p"))
    mine, theirs = identities or (identity_of(1), identity_of(2))
    prefill = Node(link, mine, p_limits or limits)
    decode = Node(ZmqLink(), theirs, limits)
    try:
        yield prefill, decode
    finally:
        assert decode.close()
        assert prefill.close()


def lend(prefill: Node, request: int, blocks: int, lease_s: float | None = None) -> TransferId:
    """Offer the blocks of a request; the offer's id."""
    transfer = new_transfer()
    prefill.offer(transfer, offered(request, blocks), lease_s=lease_s)
    return transfer


def until(ask: Callable[[], _T], enough: Callable[[_T], bool]) -> _T:
    give_up_s = time.monotonic() + PATIENCE_S
    while not enough(answer := ask()):
        assert time.monotonic() < give_up_s, f"only {answer}"
        time.sleep(0.002)
    return answer


def ended(decode: Node, transfers: set[TransferId]) -> dict[TransferId, Finished]:
    done: dict[TransferId, Finished] = {}

    def more() -> set[TransferId]:
        for finished in decode.poll():
            assert isinstance(finished, Finished)
            assert finished.transfer not in done, "told twice"
            done[finished.transfer] = finished
        return set(done)

    until(more, lambda got: got == transfers)
    return done


def fetched(decode: Node, address: str, transfer: TransferId, request: int, blocks: int) -> bool:
    """Whether a pull of the first blocks of a request brings all of them, right and once."""
    sink = CanarySink(request)
    decode.pull(transfer, address, wanted(request, blocks), sink)
    done = ended(decode, {transfer})[transfer]
    assert (sink.wrong, sink.twice, len(sink.there)) == (0, 0, done.installed)
    return done.complete and done.installed == blocks


def released(prefill: Node, transfers: set[TransferId]) -> dict[TransferId, Release]:
    found: list[Release] = []

    def more() -> list[Release]:
        found.extend(prefill.poll())
        return found

    until(more, lambda got: len(got) >= len(transfers))
    assert sorted(r.transfer for r in found) == sorted(transfers), "each is released once"
    return {r.transfer: r for r in found}
