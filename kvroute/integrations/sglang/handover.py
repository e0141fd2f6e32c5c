"""Prefill and decode apart: SGLang moves the KV of a prompt to another engine, and its rows are fetched beside it.

Prefill lends copies of a prompt's rows when it sends the last of its KV. The *ticket* that says where they are goes in
SGLang's own message with a request's first token: in the words of ``MetadataBuffers.bootstrap_room`` that SGLang leaves
at 0. So it comes with the KV that it is of, through no client and no router, and a peer without kvroute reads nothing
of it. Decode keeps a request whose KV has come from running until its rows have come too, or a limit is over.

Of ranks that share their requests the first one alone has rows, on either side: it lends and fetches, and no other rank
waits for a message of ours. SGLang lets no rank of decode run a request that another one keeps. A rank of decode may
have its KV from several ranks of prefill, each of which writes the message with the first token: so all of them write
the same ticket.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import secrets
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from cache_manager.errors import ConfigError, KVRouteError
from cache_manager.keys import BlockKey
from kvroute.connector.carriers.by_transfer import LATE
from kvroute.connector.crossing import Came, Crossing, link_of
from kvroute.connector.limits import LIMITS, Limits
from kvroute.connector.settings import Lending
from kvroute.connector.tickets import MIXED, NO_TICKET
from kvroute.integrations.sglang.passes import Ids
from kvroute.integrations.sglang.ranks import Digests, Least
from kvroute.integrations.sglang.rows import RoutedRows
from kvroute.routes.token_hash import token_hash

logger = logging.getLogger(__name__)

ARRIVAL: Final = "kvroute_arrival"
"""The attribute of decode's request with the :class:`Arrival` of its prompt's rows."""
NOT_LENT: Final = "prefill could not lend the rows: its log says why"
NOT_ASKED: Final = "prefill was not asked for routed experts"
OTHER_PROMPT: Final = "prompt: prefill's tokens are others"
_MAGIC: Final = b"kvr1"
_WORDS: Final = struct.Struct("<4sBxH16s16s16s")
_WORDS_COUNT: Final = _WORDS.size // 8
PORT_MAX: Final = 65_535
_PLACE: Final = struct.Struct("<16sQQ16s")
LENT, _MIXED, _NOT_LENT, _NOT_ASKED = range(1, 5)
_WHY: Final[Mapping[int, str]] = {_MIXED: MIXED, _NOT_LENT: NOT_LENT, _NOT_ASKED: NOT_ASKED}


@dataclass(frozen=True, slots=True)
class PackedTicket:
    """Where the rows of a prompt are lent: 56 bytes, which are seven of SGLang's words. With ``why`` nothing is lent.

    >>> ticket = PackedTicket(bytes(range(16)), "tcp://[::1]:7010", token_hash([1, 2]))
    >>> PackedTicket.read(ticket.words()) == ticket
    True
    >>> PackedTicket.read(np.zeros(7, np.uint64)).why == NO_TICKET
    True
    """

    transfer: bytes = bytes(16)
    address: str = ""
    digest: bytes = bytes(16)  # of the prompt's tokens
    why: str = ""

    def words(self) -> NDArray[np.uint64]:
        """``[7]``."""
        state, port, ip = LENT, 0, bytes(16)
        if self.why:
            state = next((state for state, why in _WHY.items() if why == self.why), _NOT_LENT)
        else:
            host, port = ip_and_port(self.address, "address")
            ip = host.packed if host.version == 6 else ipaddress.ip_address(f"::ffff:{host}").packed
        packed = _WORDS.pack(_MAGIC, state, port, self.transfer, ip, self.digest)
        return np.frombuffer(packed, "<u8").astype(np.uint64)

    @classmethod
    def read(cls, words: NDArray[np.uint64]) -> PackedTicket:
        magic, state, port, transfer, ip, digest = _WORDS.unpack(words.astype("<u8").tobytes())
        if magic != _MAGIC or state not in (LENT, *_WHY):
            return cls(why=NO_TICKET)
        if state != LENT:
            return cls(why=_WHY[state])
        host = ipaddress.IPv6Address(ip)
        text = str(host.ipv4_mapped) if host.ipv4_mapped else f"[{host}]"
        return cls(transfer, f"tcp://{text}:{port}", digest)


def ip_and_port(address: str, name: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    """The IP address and the port (0 for any) of ``tcp://IP:PORT``, which has a place in a ticket.

    Raises :class:`ConfigError` for another one.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        ip = ipaddress.ip_address(host.strip("[]"))
    except ValueError as error:
        raise ConfigError(name, "tcp://IP:PORT with prefill and decode apart", repr(address)) from error
    if not address.startswith("tcp://") or ip.is_unspecified:
        raise ConfigError(name, "tcp://IP:PORT that other engines reach, with prefill and decode apart", repr(address))
    return ip, 0 if port == "*" else int(port)


def lend_of_rank(lend: str, rank: int) -> str:
    """Where one of the ranks with requests of their own lends: of ``tcp://IP:PORT`` at ``PORT + rank``.

    >>> lend_of_rank("tcp://[::1]:9700", 2)
    'tcp://[::1]:9702'
    >>> lend_of_rank("tcp://10.0.0.5:*", 2)
    'tcp://10.0.0.5:*'

    Raises :class:`ConfigError` for another address, and where there is no such port.
    """
    _, port = ip_and_port(lend, "lend")
    if not port:
        return lend
    if port + rank > PORT_MAX:
        raise ConfigError("lend", f"a port of at most {PORT_MAX - rank}, or *: {rank + 1} ranks lend", repr(lend))
    return f"{lend.rpartition(':')[0]}:{port + rank}"


@dataclass(slots=True, eq=False)
class Arrival:
    """The rows of a prompt on their way into decode's pages."""

    transfer: bytes
    pages: int
    began_s: float
    until_s: float  # then its request waits no longer
    over: bool = False
    why: Mapping[int, str] = field(default_factory=dict)  # by page of the request
    receiver: Any = None  # SGLang's, of the KV


class PrefillTickets:
    """The tickets of a prefill engine's prompts. Each of its ranks makes the same ones, because it sends the same
    prompts in the same order; the first rank lends the rows that they name.

    A ticket's transfer is of its prompt and its room, and of its place in that order: a rank with another order names
    transfers that do not exist.
    """

    def __init__(self, engine: bytes, address: str) -> None:
        """``engine`` are 16 random bytes."""
        self._engine, self._address = engine, address
        self._prompts = 0

    @classmethod
    def agreed(cls, own: PrefillTickets | None, least: Least) -> PrefillTickets:
        """Those of the first rank, which alone has its ``own``. Each rank calls it once, at the start."""
        said: Digests = np.full(8 * _WORDS_COUNT, 256)  # more than any byte
        if own is not None:
            said = np.frombuffer(PackedTicket(own._engine, own._address).words().tobytes(), np.uint8).astype(np.int64)
        first = PackedTicket.read(least(said).astype(np.uint8).view(np.uint64))
        return cls(first.transfer, first.address)

    def next(self, tokens: Sequence[int], room: int) -> PackedTicket:
        """The ticket of a prompt that is sent to SGLang's ``room``."""
        self._prompts += 1
        digest = token_hash(tokens)
        place = _PLACE.pack(self._engine, self._prompts, room, digest)
        return PackedTicket(hashlib.blake2b(place, digest_size=16).digest(), self._address, digest)

    def lend(self, req: Any, buffers: Any) -> None:
        """SGLang sends the last of a prompt's KV from a rank without rows, and with it what is in ``buffers``."""
        if req.return_routed_experts:
            ticket = self.next(list(req.origin_input_ids), room_of(req))
        else:
            ticket = PackedTicket(why=NOT_ASKED)
        put(ticket, req, buffers)


def room_of(req: Any) -> int:
    """SGLang's name for the meeting of a request's two halves."""
    return int(req.bootstrap_room or 0)


def put(ticket: PackedTicket, req: Any, buffers: Any) -> None:
    """Into the words of a request's message with the first token that SGLang leaves at 0."""
    buffers.bootstrap_room[req.metadata_buffer_index, 1:] = torch.from_numpy(ticket.words())


class Handover:
    """Lends and fetches the rows of prompts beside ``rows``, over a link of its own. The scheduler's thread calls it.

    ``rank`` is its number among the ranks with requests of their own, each of which has a link of its own. Raises
    :class:`ConfigError` for an address that cannot be lent at.
    """

    def __init__(self, rows: RoutedRows, settings: Lending, limits: Limits = LIMITS, *, rank: int = 0) -> None:
        self._rows, self._limits = rows, limits
        self.crossing = Crossing(
            rows.aux,
            link_of(lend_of_rank(settings.lend, rank), settings.keys),
            limits=limits.transfer,
            lease_s=limits.lease_s,
            lent_nbytes_max=settings.lent_nbytes_max,
        )
        self.tickets = PrefillTickets(secrets.token_bytes(16), self.crossing.address)
        self.not_lent = 0
        """Prompts whose rows could not be lent."""
        self._under_way: dict[bytes, Arrival] = {}

    # ---------------------------------------------------------------- prefill

    def lend(self, tokens: Sequence[int], slots: Ids, room: int) -> PackedTicket:
        """The prompt of these ``tokens`` is computed, and lies in ``slots``; all passes that wrote it are over. It is
        sent to SGLang's ``room``."""
        self.poll()
        rows, ticket = self._rows, self.tickets.next(tokens, room)
        pages = slots[:: rows.page] // rows.page
        if rows.weights.mixed:
            return PackedTicket(why=MIXED)
        try:
            lives = rows.settled(pages)
            keys = self._keys(ticket.transfer, pages)
            self.crossing.lender.lend(ticket.transfer, 0, keys, lives.tolist(), len(slots))
        except KVRouteError as error:
            if not self.not_lent:
                logger.warning("rows of a prompt are not lent: %s; others are counted", error)
            self.not_lent += 1
            return PackedTicket(why=NOT_LENT)
        return ticket

    def _keys(self, transfer: bytes, pages: Ids) -> dict[BlockKey, int]:
        """Names for a transfer's pages, independent of tokens: the ticket has the tokens' hash."""
        names = [self._rows.aux.keys.adopt(transfer + place.to_bytes(4, "little")) for place in range(len(pages))]
        return dict(zip(names, pages.tolist(), strict=True))

    # ---------------------------------------------------------------- decode

    def receive(self, ticket: PackedTicket, tokens: Sequence[int], slots: Ids, *, wanted: bool) -> Arrival:
        """KV of these ``tokens`` has come into ``slots``, which were given out for it. Its rows come from now on, if
        they are ``wanted``; else prefill is told that it may forget them."""
        now_s, rows = time.monotonic(), self._rows
        pages = slots[:: rows.page] // rows.page
        arrival = Arrival(ticket.transfer, len(pages), now_s, now_s + self._limits.fetch_s)
        why = ticket.why
        if not why and ticket.digest != token_hash(tokens):
            why = OTHER_PROMPT
        arrival.over = bool(why) or not wanted
        if why and wanted:
            arrival.why = dict.fromkeys(range(len(pages)), why)
            rows.meter.miss(why, len(slots))
        fetched = pages if wanted and not why else pages[:0]
        rows.came(pages, partial(self._fetch, arrival, ticket, fetched, len(slots)))
        return arrival

    def _fetch(self, arrival: Arrival, ticket: PackedTicket, pages: Ids, tokens: int) -> None:
        """The pages have begun their lives."""
        if ticket.why:
            return
        self._under_way[ticket.transfer] = arrival
        lives = self._rows.aux.generations(pages).tolist()
        keys = self._keys(ticket.transfer, pages)
        self.crossing.borrower.fetch(ticket.transfer, ticket.address, 0, keys, lives, tokens if len(pages) else 0)

    def goes_on(self, arrival: Arrival) -> bool:
        """Whether the request waits no longer for its rows; what comes later still lands until the request ends."""
        self.poll()
        if not arrival.over and time.monotonic() >= arrival.until_s:
            if not arrival.why:
                arrival.why = dict.fromkeys(range(arrival.pages), LATE.format(self._limits.fetch_s))
            return True
        return arrival.over

    def poll(self) -> None:
        """Learn which transfers are over."""
        for ended in self.crossing.poll():
            if not isinstance(ended, Came) or (arrival := self._under_way.pop(ended.transfer, None)) is None:
                continue
            if arrival.over:  # prefill was told that nothing is wanted
                continue
            arrival.over, arrival.why = True, dict(ended.why)
            self._rows.meter.took("transfer", time.monotonic() - arrival.began_s)
            for why in ended.why.values():
                self._rows.meter.miss(why, self._rows.page)

    def close(self) -> None:
        self.crossing.close()


__all__ = [
    "ARRIVAL",
    "NOT_ASKED",
    "NOT_LENT",
    "OTHER_PROMPT",
    "Arrival",
    "Handover",
    "PackedTicket",
    "PrefillTickets",
    "ip_and_port",
    "lend_of_rank",
]
