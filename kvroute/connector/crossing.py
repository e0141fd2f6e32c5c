"""Rows cross from the engine that computed a prompt to the engine that goes on from it, over one node in each worker.

A :class:`Lender` offers copies of the content of blocks in given lives, so that no engine keeps a block for it. A
:class:`Borrower` fetches into blocks of given lives. KV is a second part of a block, for engines without another mover
of KV. The transfer binds rows to KV: its id is drawn for one computation of one prompt, it is lent from the same lives
whose KV goes over, and it is fetched once. ``docs/prefill-decode.md`` has a table of failures.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from msgspec.structs import replace

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import KVRouteError
from cache_manager.keys import KEY_NBYTES, BlockKey
from cache_manager.ports import KVBlocks
from cache_manager.record import OfferedRecord, RecordHeader
from cache_manager.slots import prefix_bits
from cache_manager.spec import RecordLayout
from kvroute.connector.limits import LIMITS
from transfer import (
    BootId,
    Finished,
    Identity,
    Node,
    OfferedBlock,
    Release,
    TransferId,
    TransferLimits,
    WantedBlock,
    part_of,
)
from transfer.errors import NodeClosedError, NodeFullError
from transfer.link import Link

LENT_NBYTES_MAX: Final = 4 << 30
"""Bytes of copies, rows and KV, that are lent and not fetched yet: copies beyond this limit are refused."""
ROWS_PART: Final = 0
KV_PART: Final = 1


@dataclass(frozen=True, slots=True)
class Came:
    """A fetch is over: none of its records lands from here on.

    ``kv`` are the indices of the request's blocks whose KV is there; ``why`` has the reason for the other blocks, and
    for blocks whose rows did not all come.
    """

    transfer: bytes
    kv: frozenset[int]
    why: Mapping[int, str]


def link_of(address: str, keys: str = "") -> Link:
    """A ZeroMQ link that lends at ``address``. With ``keys``, a secret key file of all peers, also for other hosts.

    Raises :class:`ConfigError` for an invalid one.
    """
    from transfer import ZmqLink, ZmqSettings  # ZeroMQ is loaded where rows are lent
    from transfer.curve import read_keys

    return ZmqLink(ZmqSettings(bind=address, keys=read_keys(Path(keys)) if keys else None))


class Crossing:
    """Both ends beside the ``blocks`` of one engine, over one node of ``link``. It owns the node, and the link.

    With ``kv`` a block has two parts, its rows and its KV. Copies of at most ``lent_nbytes_max`` bytes are lent at a
    time, for ``lease_s`` until decode asks for them. All but :meth:`close` return at once.
    """

    def __init__(
        self,
        blocks: AuxBlocks,
        link: Link,
        *,
        kv: KVBlocks | None = None,
        limits: TransferLimits | None = None,
        lease_s: float = LIMITS.lease_s,
        lent_nbytes_max: int = LENT_NBYTES_MAX,
    ) -> None:
        self._blocks = blocks
        self._namespace = blocks.namespace
        try:
            parts = [part_of("rows", blocks.layout, replicated=True)]
            if kv is not None:
                parts.append(part_of("kv", RecordLayout((kv.spec,))))
            identity = Identity(BootId(secrets.token_bytes(16)), self._namespace, tuple(parts))
        except BaseException:
            link.close(0.0)
            raise
        self.node = Node(link, identity, limits or LIMITS.transfer)
        self.lender = Lender(blocks, self.node, kv, lease_s, lent_nbytes_max)
        self.borrower = Borrower(blocks, self.node, kv)

    @property
    def address(self) -> str:
        return self.node.address

    def follow(self) -> None:
        """The blocks' weights may have changed: from here on no record of earlier weights goes out or comes in."""
        if self._blocks.namespace != self._namespace:
            self._namespace = self._blocks.namespace
            with suppress(NodeClosedError):  # then nothing crosses
                self.node.reset(self._namespace)

    def poll(self) -> list[Release | Came]:
        """The transfers that ended since the last call: sent ones and received ones."""
        ended = self.borrower.refused()
        for event in self.node.poll():
            if isinstance(event, Release):
                self.lender.ended(event)
                ended.append(event)
            elif (came := self.borrower.ended(event)) is not None:
                ended.append(came)
        return ended

    def close(self) -> None:
        self.node.close()


class Lender:
    """Offers the content of device blocks as steps fill them: rows, and KV if there is a port for it."""

    def __init__(
        self,
        blocks: AuxBlocks,
        node: Node,
        kv: KVBlocks | None,
        lease_s: float,
        lent_nbytes_max: int,
    ) -> None:
        self._blocks = blocks
        self._node = node
        self._kv = kv
        self._block_nbytes = blocks.layout.nbytes + (RecordLayout((kv.spec,)).nbytes if kv else 0)
        self._lease_s = lease_s
        self._lent_nbytes_max = lent_nbytes_max
        self._lent: dict[TransferId, int] = {}  # bytes of each transfer until it is released
        self._open: set[TransferId] = set()
        self._over: set[TransferId] = set()  # failed or ended before their last block: no more of them is lent
        self._lock = threading.Lock()

    @property
    def lent_nbytes(self) -> int:
        """Bytes of the copies that are lent. A copy counts until the node is done with it, whoever polls."""
        in_flight = self._node.lent
        with self._lock:
            return sum(nbytes for name, nbytes in self._lent.items() if name in in_flight)

    def lend(
        self,
        transfer: bytes,
        first: int,
        blocks: Mapping[BlockKey, int],
        lives: Sequence[int],
        tokens: int,
        *,
        last: bool = True,
    ) -> None:
        """Offer ``blocks``, in these ``lives``, as the request's blocks ``first`` and on; copied when this returns.

        They hold ``tokens`` tokens from the start of the first one. ``last``: no more blocks follow. No blocks without
        ``last``: all are still to come. Rows that a block lacks are absent.

        Raises :class:`KVRouteError` if the node takes no more, or copies would exceed ``lent_nbytes_max``: then the
        whole transfer is withdrawn, decode is told of what it has begun to fetch, and further calls for it raise, too.
        """
        name = TransferId(transfer)
        nbytes = len(blocks) * self._block_nbytes
        try:
            if name in self._over:
                raise NodeClosedError("earlier blocks of this transfer are not lent any more")
            if self.lent_nbytes + nbytes > self._lent_nbytes_max:
                raise NodeFullError("lent_nbytes_max", self._lent_nbytes_max, self.lent_nbytes + nbytes)
            offered = self._offered(transfer, first, blocks, lives, tokens)
            with self._lock:  # another thread may learn that the offer has ended
                if name not in self._open:
                    self._node.offer(name, offered, is_open=not last, lease_s=self._lease_s)
                else:
                    self._node.grow(name, offered)
                    if last:
                        self._node.seal(name)
                self._lent[name] = self._lent.get(name, 0) + nbytes
                if last:
                    self._open.discard(name)
                else:
                    self._open.add(name)
        except KVRouteError as error:
            if name in self._open:
                self.withdraw(transfer, str(error))
            with self._lock:
                if last:
                    self._over.discard(name)
                else:
                    self._over.add(name)
            raise

    def withdraw(self, transfer: bytes, why: str) -> None:
        """Lend no more of a computation that does not go over; harmless when nothing is on offer. A full or closed node
        lends it until its lease ends: there is no ticket for it."""
        with self._lock:
            self._open.discard(TransferId(transfer))
            self._over.discard(TransferId(transfer))
        with suppress(KVRouteError):
            self._node.withdraw(TransferId(transfer), why)

    def ended(self, release: Release) -> None:
        with self._lock:
            if release.transfer in self._open:
                self._open.discard(release.transfer)
                self._over.add(release.transfer)
            self._lent.pop(release.transfer, None)

    def _offered(
        self,
        transfer: bytes,
        first: int,
        blocks: Mapping[BlockKey, int],
        lives: Sequence[int],
        tokens: int,
    ) -> list[OfferedBlock]:
        counts = counts_of(len(blocks), tokens, self._blocks.block_tokens)
        rows = self._blocks.exchange.export(blocks, lives, counts)
        if self._kv is not None:
            records = zip(blocks, rows, self._kv_records(self._kv, blocks, lives, counts), strict=True)
            return [OfferedBlock(first + i, key, (row, kv)) for i, (key, row, kv) in enumerate(records)]
        offered = list[OfferedBlock]()
        for index, row in enumerate(rows, first):
            name = lent_key(transfer, index)
            offered.append(OfferedBlock(index, name, (row and dataclasses.replace(row, key=name),)))
        return offered

    def _kv_records(
        self,
        kv: KVBlocks,
        blocks: Mapping[BlockKey, int],
        lives: Sequence[int],
        counts: Sequence[int],
    ) -> list[OfferedRecord | None]:
        layout = RecordLayout((kv.spec,))
        ids = list(blocks.values())
        raw = np.zeros((len(ids), layout.nbytes), np.uint8)
        raw[:, : kv.spec.block_nbytes], origins = self._blocks.exchange.take_kv(kv, ids, lives)
        records: list[OfferedRecord | None] = []
        for i, (key, count) in enumerate(zip(blocks, counts, strict=True)):
            raw[i, count * (kv.spec.block_nbytes // self._blocks.block_tokens) :] = 0  # the rest is of other KV
            valid = ((1 << count) - 1).to_bytes(8 * layout.valid_words, "little")
            record = OfferedRecord(key, layout.fingerprint, lives[i], origins[i], valid, raw[i].data)
            records.append(record if origins[i] else None)
        return records


class Borrower:
    """Fetches lent records into device blocks, each in the life that it has now."""

    def __init__(
        self,
        blocks: AuxBlocks,
        node: Node,
        kv: KVBlocks | None = None,
    ) -> None:
        self._blocks = blocks
        self._node = node
        self._kv = kv
        self._under_way: dict[bytes, _Landing] = {}
        self._refused: deque[Release | Came] = deque()

    def fetch(
        self,
        transfer: bytes,
        address: str,
        first: int,
        blocks: Mapping[BlockKey, int],
        lives: Sequence[int],
        tokens: int,
    ) -> None:
        """Begin to fetch the request's blocks ``first`` and on into ``blocks``: ``tokens`` from their start.

        If another mover brings the KV, that KV counts as this transfer's from here on. No blocks are fine: prefill then
        learns that it may release the offer. A fetch that cannot begin ends like any other, by :meth:`Crossing.poll`.
        """
        counts = counts_of(len(blocks), tokens, self._blocks.block_tokens)
        landing = _Landing(self._blocks, self._kv, transfer, first, blocks, list(lives), counts)
        parts = (ROWS_PART,) if self._kv is None else (ROWS_PART, KV_PART)
        if self._under_way.setdefault(transfer, landing) is not landing:
            self._refused.append(landing.nothing("this transfer is being fetched already"))
            return
        try:
            names: Iterable[BlockKey] = blocks
            if self._kv is None:
                names = [lent_key(transfer, first + i) for i in range(len(blocks))]
                for i, (block, life) in enumerate(zip(landing.ids, lives, strict=True)):
                    self._blocks.exchange.bind_origin(block, life, landing.origin(i))
            wanted = [WantedBlock(first + i, key, parts) for i, key in enumerate(names)]
            self._node.pull(TransferId(transfer), address, wanted, landing)
        except Exception as error:  # noqa: BLE001 - the fetch is over, whatever it was: its request waits for it
            del self._under_way[transfer]
            why = str(error) if isinstance(error, KVRouteError) else repr(error)
            self._refused.append(landing.nothing(why))

    def give_up(self, blocks: set[int]) -> None:
        """Drop records on their way to these blocks. A fetch whose blocks are all given up is over at once."""
        for landing in list(self._under_way.values()):
            dropped = blocks.intersection(landing.ids)
            if dropped:
                landing.given_up |= dropped
                if landing.given_up.issuperset(landing.ids):
                    with suppress(KVRouteError):  # a full or closed node ends the fetch by itself
                        self._node.abort(TransferId(landing.transfer), "its blocks are given up")

    def refused(self) -> list[Release | Came]:
        refused = list[Release | Came]()
        with suppress(IndexError):
            while True:
                refused.append(self._refused.popleft())
        return refused

    def ended(self, finished: Finished) -> Came | None:
        """The result of a fetch that is over; ``None``: it was :meth:`refused`."""
        landing = self._under_way.pop(finished.transfer, None)
        if landing is None:
            return None
        detail = f": {finished.detail}" if finished.detail else ""
        why = landing.short | {
            part.index: part.reason.value + detail
            for part in finished.missing
            if part.part == ROWS_PART or part.index not in landing.kv_there
        }
        return Came(finished.transfer, frozenset(landing.kv_there), why)


@dataclass(slots=True, eq=False)
class _Landing:
    """One fetch: the node's thread installs, and the engine's thread reads the result when it is over."""

    rows: AuxBlocks
    kv: KVBlocks | None
    transfer: bytes
    first: int
    blocks: Mapping[BlockKey, int]
    lives: list[int]
    counts: list[int]
    given_up: frozenset[int] = frozenset()
    kv_there: set[int] = field(default_factory=set)
    short: dict[int, str] = field(default_factory=dict)
    keys: list[BlockKey] = field(init=False)
    ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.keys, self.ids = list(self.blocks), list(self.blocks.values())

    def nothing(self, why: str) -> Came:
        """The result of a fetch that has not begun."""
        return Came(self.transfer, frozenset(), dict.fromkeys(range(self.first, self.first + len(self.blocks)), why))

    def origin(self, place: int) -> int:
        """The origin of the KV that another mover brings into a block beside this transfer."""
        return int.from_bytes(lent_key(self.transfer, self.first + place)[:8], "little") or 1

    def install(
        self,
        part: int,
        index: int,
        header: RecordHeader,
        payload: memoryview,
    ) -> bool:
        """For the node; see :class:`transfer.node.BlockSink`."""
        place = index - self.first
        assert 0 <= place < len(self.ids), f"block {index} was not requested"
        if self.ids[place] in self.given_up:
            return False
        return self._put_kv(place, header, payload) if part == KV_PART else self._put_rows(place, header, payload)

    def _put_rows(self, place: int, header: RecordHeader, payload: memoryview) -> bool:
        tokens = self.rows.block_tokens
        specs = len(self.rows.layout.specs)
        wanted = prefix_bits(np.array([self.counts[place]]), tokens)[0]
        bits = np.frombuffer(header.valid, "<u8").reshape(specs, -1) & wanted
        header = replace(header, key=self.keys[place], valid=bits.astype("<u8").tobytes())
        if self.kv is None:
            header = replace(header, origin=self.origin(place))
        if not self.rows.exchange.install(self.ids[place], self.lives[place], header, payload):
            return False
        held = int(np.bitwise_count(bits[0]).sum())
        if held < self.counts[place]:
            self.short[self.first + place] = f"prefill had rows of {held} of the {self.counts[place]} tokens"
        return True

    def _put_kv(self, place: int, header: RecordHeader, payload: memoryview) -> bool:
        assert self.kv is not None, "a part that was not requested"
        wanted = (1 << self.counts[place]) - 1
        if int.from_bytes(header.valid, "little") & wanted != wanted or not header.origin:
            return False
        if not self.rows.exchange.fill_kv(self.kv, self.ids[place], self.lives[place], header.origin, payload):
            return False
        self.kv_there.add(self.first + place)
        return True


def lent_key(transfer: bytes, index: int) -> BlockKey:
    """The name on both sides of a transfer's block whose KV another mover brings: their ranks may differ in keys."""
    text = transfer + index.to_bytes(8, "little")
    return BlockKey(hashlib.blake2b(text, digest_size=KEY_NBYTES, person=b"kvroute.lent").digest())


def counts_of(blocks: int, tokens: int, size: int) -> list[int]:
    """How many of ``tokens`` tokens each of ``blocks`` successive blocks of ``size`` has."""
    return [max(0, min(size, tokens - i * size)) for i in range(blocks)]


__all__ = ["Borrower", "Came", "Crossing", "Lender", "link_of"]
