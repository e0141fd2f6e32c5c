"""What has become of an engine's blocks, as operations in order: from a scheduler's process to a worker's.

A scheduler gives blocks out; the worker's process has their rows. The scheduler writes each step's operations into a
:class:`BlockFeed`, takes them as bytes and sends them along with the step; the worker applies them, in order and before
the step, with :meth:`AuxBlocks.apply`. Batches are numbered from 0: a gap is found, a repetition does nothing. They
carry the feed's *epoch*, a random number: a scheduler that was started anew beside a living worker begins another one.
Generations begin at another number in each epoch, so that a new scheduler takes no rows of the one before for its own.

Bytes are MessagePack; block ids, pairs and generations are little-endian int64, so that a thousand blocks cost no
Python object each. Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np

from cache_manager.errors import FeedGapError, InvalidInputError, KVRouteError
from cache_manager.keys import KEY_NBYTES, BlockKey
from cache_manager.lock import Mistakes
from cache_manager.slots import Ints, SlotSpace, count_in_range, integers
from cache_manager.tiers import Tiers

Weights = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Operation(msgspec.Struct, frozen=True, array_like=True, tag=str.lower):
    """What has become of some blocks."""

    def do(self, to: Any) -> None:
        """Apply this operation to an :class:`AuxBlocks`."""
        raise NotImplementedError


class Renew(Operation, frozen=True):
    """These blocks were given out, in these generations."""

    blocks: np.ndarray
    generations: np.ndarray

    def __post_init__(self) -> None:
        _check_each(self.blocks, self.generations)

    def do(self, to: Any) -> None:
        to.renew(self.blocks, self.generations)


class Retire(Renew, frozen=True):
    """These blocks were given out, in these generations, for something that has no rows."""

    def do(self, to: Any) -> None:
        to.retire(self.blocks, self.generations)


class Copy(Operation, frozen=True):
    """Blocks were copied: ``pairs`` (source, target), flat; at most the first ``rows`` of each."""

    pairs: np.ndarray
    rows: np.ndarray | None

    def __post_init__(self) -> None:
        sources = self.pairs[::2]
        targets = self.pairs[1::2]
        _check_each(sources, targets)
        if self.rows is not None:
            _check_each(sources, self.rows)

    def do(self, to: Any) -> None:
        pairs = self.pairs.reshape(-1, 2)
        to.copy(pairs, self.rows)


class _Keyed(Operation, frozen=True):
    """About these blocks, in these generations, under these keys (32 bytes each)."""

    keys: bytes
    blocks: np.ndarray
    generations: np.ndarray

    def __post_init__(self) -> None:
        _check_each(self.blocks, self.generations)
        n = self.blocks.size
        is_whole = len(self.keys) == KEY_NBYTES * n
        if not is_whole or len(self.by_key) != n:
            raise InvalidInputError("feed", f"{n} keys of {KEY_NBYTES} bytes, each once", self.keys)

    @property
    def by_key(self) -> dict[BlockKey, int]:
        starts = range(0, len(self.keys), KEY_NBYTES)
        keys = [BlockKey(self.keys[at : at + KEY_NBYTES]) for at in starts]
        blocks = self.blocks.tolist()
        return dict(zip(keys, blocks, strict=True))


class Persist(_Keyed, frozen=True):
    """Store the rows of these blocks."""

    def do(self, to: Any) -> None:
        to.begin_persist(self.by_key, self.generations)


class Restore(_Keyed, frozen=True):
    """The KV of these keys is loaded into these blocks: restore the rows beside it."""

    def do(self, to: Any) -> None:
        to.begin_restore(self.by_key, self.generations)


class Reset(Operation, frozen=True):
    """The weights have changed."""

    weights_version: Weights

    def do(self, to: Any) -> None:
        to.reset(weights_version=self.weights_version)


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """Batch ``number`` of the feed ``epoch``: operations in the order in which they happened."""

    version: Literal[5]
    epoch: int
    number: int
    operations: list[Renew | Retire | Copy | Persist | Restore | Reset]


def _check_each(first: Ints, *others: Ints) -> None:
    if any(other.size != first.size for other in others):
        raise InvalidInputError("feed", f"{first.size} integers", [other.size for other in others])


def _unpacked(_: Any, packed: Any) -> Ints:
    if not isinstance(packed, bytes) or len(packed) % 8:
        raise InvalidInputError("feed", "whole 64-bit integers", repr(packed))
    return np.frombuffer(packed, "<i8").astype(np.int64)


def _packed(ints: Ints) -> bytes:
    return ints.astype("<i8", copy=False).tobytes()


_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=_packed)
_DECODER: Final = msgspec.msgpack.Decoder(Batch, dec_hook=_unpacked)


class BlockFeed:
    """The scheduler's end: what happens to ``blocks`` blocks, and the generation that each is in.

    >>> feed = BlockFeed(blocks=4)
    >>> (feed.renew([3]) < feed.renew([3])).tolist(), len(feed.take()) > 0, feed.take()
    ([True], True, b'')
    """

    def __init__(self, blocks: int) -> None:
        self._blocks = SlotSpace("device", count_in_range(blocks, "blocks", 1), 1)
        self._operations: list[Any] = []
        random = np.random.default_rng()  # of the system's entropy
        self._epoch = int(random.integers(1 << 62))
        self._number = 0
        self.generations: Ints = np.full(blocks, self._epoch >> 16)  # below half of GENERATION_END

    def renew(self, blocks: Sequence[int] | Ints) -> Ints:
        """Blocks were given out anew; the generations they begin ``[n]``. A block may be named once in a call."""
        return self._begin_lives(blocks, Renew)

    def retire(self, blocks: Sequence[int] | Ints) -> Ints:
        """As :meth:`renew`, of blocks that were given out for something that has no rows."""
        return self._begin_lives(blocks, Retire)

    def _begin_lives(self, blocks: Sequence[int] | Ints, operation: type[Renew]) -> Ints:
        ids = self._blocks.ids(blocks)
        if not self._blocks.differ(ids):
            raise InvalidInputError("blocks", "each block once", ids.tolist()[:8])
        self.generations[ids] += 1
        lives: Ints = self.generations[ids]
        self._operations.append(operation(ids, lives.copy()))
        return lives

    def copy(self, pairs: Any, rows: Sequence[int] | None = None) -> None:
        """Blocks were copied to blocks, ``pairs [n, 2]``; at most the first ``rows`` of each."""
        ids = integers(pairs, "feed pairs", "(source, target) pairs of block ids", ndim=2)
        flat = ids.reshape(-1)
        limits = None if rows is None else integers(rows, "feed rows", "one count for each pair")
        self._operations.append(Copy(flat, limits))

    def persist(self, blocks: Mapping[BlockKey, int]) -> None:
        """Store the rows of blocks, in the generations that they are in now."""
        self._operations.append(Persist(*self._keyed(blocks)))

    def restore(self, blocks: Mapping[BlockKey, int]) -> None:
        """Restore the rows of blocks whose KV comes back."""
        self._operations.append(Restore(*self._keyed(blocks)))

    def _keyed(self, blocks: Mapping[BlockKey, int]) -> tuple[bytes, Ints, Ints]:
        ids = self._blocks.ids(list(blocks.values()))
        return b"".join(blocks), ids, self.generations[ids]

    def reset(self, weights_version: int) -> None:
        """The weights have changed: nothing from before is readable."""
        try:
            self._operations.append(Reset(msgspec.convert(weights_version, Weights)))
        except msgspec.ValidationError as error:
            raise InvalidInputError("weights_version", "an integer in [0, 2**63)", repr(weights_version)) from error

    def take(self) -> bytes:
        """The operations since the last time, as one numbered batch; ``b""`` when nothing has happened."""
        if not self._operations:
            return b""
        batch = Batch(5, self._epoch, self._number, self._operations)
        self._operations = []
        self._number += 1
        return _ENCODER.encode(batch)


class WorkerEnd:
    """The worker's end of a feed: which batch comes next, for blocks in ``tiers``."""

    def __init__(self, tiers: Tiers, mistakes: Mistakes) -> None:
        self._tiers = tiers
        self._mistakes = mistakes
        self.next: tuple[int, int] | None = None  # the epoch of the feed applied last, and the number of its next batch

    def apply(self, operations: bytes, to: Any) -> None:
        """Do what a batch says, by the methods of ``to``: see :meth:`AuxBlocks.apply`."""
        if isinstance(operations, bytes) and not operations:
            return
        try:
            batch = _DECODER.decode(operations)
        except (msgspec.MsgspecError, UnicodeDecodeError, TypeError) as error:
            raise InvalidInputError("feed", "a batch of a BlockFeed", str(error)) from error
        mistakes = self._mistakes
        try:
            is_next = self._begin_batch(batch.epoch, batch.number)
            for operation in batch.operations if is_next else ():
                try:
                    operation.do(to)
                except KVRouteError as error:
                    mistakes.raise_or_report("feed_operations_failed", 1, "apply", error)
        except BaseException:
            with mistakes.lock:  # what the batch still had to say is lost with this call: where is each block?
                mistakes.lock.torn += 1
                self._tiers["device"].forget_all(ends_lives=True)
            raise

    def _begin_batch(self, epoch: int, number: int) -> bool:
        """Take note of batch ``number`` of the feed ``epoch``; whether to apply it."""
        mistakes = self._mistakes
        with mistakes.lock:
            before, wanted = self.next or (epoch, 0)
            restarted = before != epoch
            if restarted:
                wanted = 0
                mistakes.report("feed_gaps", 1, "apply: a feed begins anew")
            if restarted or number > wanted:
                for table in self._tiers:  # a feed gives out device blocks: the lives of host blocks go on
                    table.forget_all(ends_lives=table.tier == "device")
            if number >= wanted:
                self.next = epoch, number + 1
        mistakes.log()
        if number > wanted:
            gap = FeedGapError(f"feed: wanted batch {wanted}, got batch {number}")
            mistakes.raise_or_report("feed_gaps", 1, "apply", gap)
        elif number < wanted:
            repetition = InvalidInputError("feed", f"batch {wanted}", number)
            mistakes.raise_or_report("feed_repetitions", 1, "apply", repetition)
        return number >= wanted
