"""What has become of an engine's blocks, as operations in order: from a scheduler's process to a worker's.

A scheduler gives blocks out; the worker's process has their rows. The scheduler writes each step's operations into a
:class:`BlockFeed`, takes them as bytes and sends them along with the step; the worker applies them, in order and before
the step, with :meth:`AuxBlocks.apply`. Batches are numbered from 0: a gap is found, a repetition does nothing. They
carry the feed's *epoch*, a random number: a scheduler that was started anew beside a living worker begins another one.

Bytes are MessagePack; block ids, pairs and generations are little-endian int64, so that a thousand blocks cost no
Python object each. Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from cache_manager.errors import BlockBusyError, FeedGapError, InvalidInputError, KVRouteError
from cache_manager.keys import KEY_NBYTES, BlockKey
from cache_manager.lock import Mistakes
from cache_manager.numbers import Ints, Numbers, count_in_range, integers
from cache_manager.ports import TierName
from cache_manager.table import BlockTable

VERSION: Final = 2
WEIGHTS_END: Final = 1 << 63


def _pack(values: Any, field: str, ndim: int = 1) -> bytes:
    return integers(values, f"feed {field}", f"integers of {ndim} dimensions", ndim=ndim).astype("<i8").tobytes()


def _ints(packed: bytes) -> Ints:
    if len(packed) % 8:
        raise InvalidInputError("feed", "whole 64-bit integers", f"{len(packed)} bytes")
    return np.frombuffer(packed, "<i8").astype(np.int64)


class Renew(msgspec.Struct, frozen=True, tag="renew", array_like=True):
    """These blocks were given out, in these generations."""

    blocks: bytes
    generations: bytes


class Copied(msgspec.Struct, frozen=True, tag="copy", array_like=True):
    """Blocks were copied: ``pairs`` (source, target), between the tiers; at most the first ``rows`` of each."""

    source: TierName
    target: TierName
    pairs: bytes
    rows: bytes | None = None


class Persist(msgspec.Struct, frozen=True, tag="persist", array_like=True):
    """Store the rows of these blocks, in these generations, under these keys (32 bytes each)."""

    keys: bytes
    blocks: bytes
    generations: bytes


class Restore(msgspec.Struct, frozen=True, tag="restore", array_like=True):
    """The KV of these keys is loaded into these blocks: bring the rows. ``origins`` (u64) of that KV, where known."""

    keys: bytes
    blocks: bytes
    generations: bytes
    origins: bytes | None = None


class Reset(msgspec.Struct, frozen=True, tag="reset", array_like=True):
    """The weights have changed."""

    weights_version: int


Operation = Renew | Copied | Persist | Restore | Reset


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """Operations number ``number`` of the feed ``epoch``, in the order in which they happened."""

    version: int
    epoch: int
    number: int
    operations: list[Operation]


_DECODER: Final = msgspec.msgpack.Decoder(Batch)


class BlockFeed:
    """The scheduler's end: what happens to ``blocks`` blocks, and the generation that each is in.

    >>> feed = BlockFeed(blocks=4)
    >>> feed.renew([2, 3]).tolist(), feed.renew([3]).tolist()
    ([1, 1], [2])
    >>> feed.generations[[2, 3]].tolist(), len(feed.take()) > 0, feed.take()
    ([1, 2], True, b'')
    """

    def __init__(self, blocks: int) -> None:
        self._blocks = Numbers("device", count_in_range(blocks, "blocks", 1), 1)
        self.generations: Ints = np.zeros(blocks, np.int64)
        self._operations: list[Operation] = []
        self._epoch, self._number = int(np.random.default_rng().integers(1 << 63)), 0  # of the system's entropy

    def renew(self, blocks: Sequence[int] | Ints) -> Ints:
        """Blocks were given out anew; the generations they begin ``[n]``. A block may be named once in a call."""
        ids = self._blocks.ids(blocks)
        if not self._blocks.differ(ids):
            raise InvalidInputError("blocks", "each block once", ids.tolist()[:8])
        self.generations[ids] += 1
        lives: Ints = self.generations[ids]
        self._operations.append(Renew(_pack(ids, "blocks"), _pack(lives, "generations")))
        return lives

    def copy(self, pairs: Any, rows: Sequence[int] | None = None) -> None:
        """Device blocks were copied to device blocks, ``pairs [n, 2]``; at most the first ``rows`` of each."""
        self._copied("device", "device", pairs, rows)

    def swap_out(self, pairs: Any) -> None:
        """Device blocks were copied to host blocks."""
        self._copied("device", "host", pairs)

    def swap_in(self, pairs: Any) -> None:
        """Host blocks were copied to device blocks."""
        self._copied("host", "device", pairs)

    def _copied(self, source: TierName, target: TierName, pairs: Any, rows: Sequence[int] | None = None) -> None:
        limits = None if rows is None else _pack(rows, "row counts")
        self._operations.append(Copied(source, target, _pack(pairs, "pairs", 2), limits))

    def persist(self, blocks: Mapping[BlockKey, int]) -> None:
        """Store the rows of blocks, in the generations that they are in now."""
        self._operations.append(Persist(*self._keyed(blocks)))

    def restore(self, blocks: Mapping[BlockKey, int], origins: Mapping[BlockKey, int] | None = None) -> None:
        """Bring the rows of blocks whose KV comes back, of these ``origins`` where they are known."""
        known = None if origins is None else b"".join(origins.get(key, 0).to_bytes(8, "little") for key in blocks)
        self._operations.append(Restore(*self._keyed(blocks), known))

    def _keyed(self, blocks: Mapping[BlockKey, int]) -> tuple[bytes, bytes, bytes]:
        """Keys, block ids and generations, packed."""
        ids = self._blocks.ids(list(blocks.values()))
        return b"".join(blocks), _pack(ids, "blocks"), _pack(self.generations[ids], "generations")

    def reset(self, weights_version: int) -> None:
        """The weights have changed: nothing from before is readable."""
        if not isinstance(weights_version, int) or not 0 <= weights_version < WEIGHTS_END:
            raise InvalidInputError("weights_version", "an integer in [0, 2**63)", repr(weights_version))
        self._operations.append(Reset(weights_version))

    def take(self) -> bytes:
        """The operations since the last time, as one numbered batch; ``b""`` when nothing has happened."""
        if not self._operations:
            return b""
        batch, self._operations = Batch(VERSION, self._epoch, self._number, self._operations), []
        self._number += 1
        return msgspec.msgpack.encode(batch)


class Fed(Mistakes):
    """The part of a set of blocks that is told what has become of them, and has a method for each operation."""

    _tables: dict[TierName, BlockTable]
    _fed: tuple[int, int] | None = None
    """By which feed, and the number of its next batch."""

    def apply(self, operations: bytes) -> list[Operation]:
        """Do what a scheduler's :class:`BlockFeed` says has become of blocks, in its order; the operations done.

        A batch that came before is not done again, and counted. Where one is missing, nobody knows what has become of
        any block: all rows are forgotten, and counted; a strict set raises :class:`FeedGapError` after that. Where the
        batches of another feed begin, its scheduler was started anew: all rows are forgotten, generations begin anew,
        and that is counted. Bytes that no feed has made are refused before anything is done.
        """
        if isinstance(operations, bytes) and not operations:
            return []
        batch, calls = decoded(operations)
        if not self._begin_batch(batch.epoch, batch.number):
            return []
        for call in calls:
            try:
                call(self)
            except KVRouteError as error:
                self.dropped("feed_operations_failed", 1, "apply", error)
        return batch.operations

    def _begin_batch(self, epoch: int, number: int) -> bool:
        """The feed ``epoch`` brings its batch ``number``; whether it is to be done."""
        with self._lock:
            restarted = self._fed is not None and self._fed[0] != epoch
            wanted = 0 if restarted or self._fed is None else self._fed[1]
            if number >= wanted:
                self._fed = epoch, number + 1
                if restarted or number > wanted:
                    for table in self._tables.values():
                        table.forget_all(lives=restarted)
                if restarted:
                    self._drop("feed_restarts", 1, "apply: a feed that begins anew: all rows are forgotten")
        if number < wanted:
            again = InvalidInputError("feed", f"batch {wanted}", number)
            self.dropped("feed_repetitions", 1, "apply", again)
        elif number > wanted:
            self.dropped("feed_gaps", 1, "apply", FeedGapError(f"feed: wanted batch {wanted}, got {number}"))
        return number >= wanted


def decoded(packed: bytes) -> tuple[Batch, list[Callable[[Any], object]]]:
    """A batch, and its operations as calls; :class:`InvalidInputError` for bytes that no feed has made."""
    try:
        batch = _DECODER.decode(packed)
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError) as error:
        raise InvalidInputError("feed", "a batch of a BlockFeed", str(error)) from error
    if batch.version != VERSION:
        raise InvalidInputError("feed version", VERSION, batch.version)
    return batch, [_call(operation) for operation in batch.operations]


def _call(operation: Operation) -> Callable[[Any], object]:
    """The operation as a call, its bytes unpacked; :class:`InvalidInputError` if they cannot be."""
    match operation:
        case Renew():
            ids = _ints(operation.blocks)
            given = _each("generations", operation.generations, ids.size)
            return lambda to: to.renew(ids, given)
        case Copied(source, target, packed, limits):
            pairs = _ints(packed)
            if pairs.size % 2:
                raise InvalidInputError("feed", "pairs of block ids", f"{pairs.size} integers")
            rows = None if limits is None else _each("row counts", limits, pairs.size // 2).tolist()
            return lambda to: to.move(source, target, pairs.reshape(-1, 2), rows)
        case Reset(version):
            return lambda to: to.reset(weights_version=version)
    blocks, origins = _by_key(operation.keys, operation.blocks), None
    lives = _each("generations", operation.generations, len(blocks))
    if isinstance(operation, Persist):
        return lambda to: _check_begun(to, to.begin_persist(blocks, lives), len(blocks))
    if operation.origins is not None:
        known = _each("origins", operation.origins, len(blocks)).view(np.uint64)
        origins = dict(zip(blocks, known.tolist(), strict=True))
    return lambda to: _check_begun(to, to.begin_restore(blocks, lives, origins), len(blocks))


def _check_begun(to: Fed, job: object | None, blocks: int) -> None:
    """A job for which there was no room is not begun later: nobody hears of it but by its count."""
    if job is None:
        full = BlockBusyError("feed", "room for what the store is to do", f"{blocks} blocks too many")
        to.dropped("feed_blocks_refused", blocks, "apply", full, mistake=False)


def _each(what: str, packed: bytes, n: int) -> Ints:
    """``n`` integers."""
    if len(packed) != 8 * n:
        raise InvalidInputError(f"feed {what}", f"{8 * n} bytes", len(packed))
    return _ints(packed)


def _by_key(keys: bytes, blocks: bytes) -> dict[BlockKey, int]:
    ids = _ints(blocks).tolist()
    each = [BlockKey(keys[at : at + KEY_NBYTES]) for at in range(0, len(keys), KEY_NBYTES)]
    found = dict(zip(each, ids, strict=False))
    if len(keys) != KEY_NBYTES * len(found) or len(found) != len(ids):
        raise InvalidInputError("feed", f"{len(ids)} keys of {KEY_NBYTES} bytes, each once", f"{len(keys)} bytes")
    return found
