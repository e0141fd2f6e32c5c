"""What the cache manager asks of the world: small structural interfaces, each with its contract.

A contract is executable: ``cache_manager.testing`` ships the test classes that any implementation subclasses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from cache_manager.keys import BlockKey
from cache_manager.record import Buffer, RecordHeader
from cache_manager.spec import RecordLayout

if TYPE_CHECKING:
    from cache_manager.storage.records import RecordCounters

HitPolicy = Literal["gate", "mask"]
"""Whether KV without rows counts as a hit: ``gate`` cuts the hit back, ``mask`` reports the rows as missing."""


class Absence(Enum):
    """Why a record did not come back."""

    MISS = "miss"
    CORRUPT = "corrupt"


class Lookup(Enum):
    """Whether a store has a record."""

    HIT = "hit"
    MISS = "miss"
    PENDING = "pending"  # nobody knows yet: ask again


class Region(Protocol):
    """Memory for the records of ``blocks`` blocks, with what a reader needs to know that it read the right thing.

    * ``words[b]`` is ``generation << 16 | sequence``: before any byte of a readable row may change, its bit is cleared
      and then the word changes.
    * ``valid[b, spec, w]`` has a bit for each row: set only after the row's bytes are in place.
    * A reader takes the word, then the bits, then the bytes, then the word again; equal words prove the bytes.

    The arrays stay valid until :meth:`close`, which raises ``BufferError`` while a view of them is still alive.
    """

    layout: RecordLayout
    blocks: int
    rows: NDArray[np.uint8]  # [blocks, layout.nbytes]
    words: NDArray[np.uint64]  # [blocks]
    valid: NDArray[np.uint64]  # [blocks, specs, valid_words]

    def renew(self, namespace: bytes) -> None:
        """Rows belong to another namespace (its fingerprint) from here on; every block was retracted before."""

    def close(self) -> None: ...


class StorageBackend(Protocol):
    """A content-addressed store of block records.

    * A record is visible whole or not at all, also after a crash; writing a key that exists is a no-op that answers
      ``True``, because equal keys mean equal bytes.
    * A miss is an :class:`Absence` and no room is ``False``; a failure is ``StorageError``. Nothing else is returned.
    * ``put`` has copied the payloads when it returns; ``get_into`` fills the whole buffer or reports an absence, after
      which the buffer's content means nothing.

    Every call is safe from several threads. One bad key fails that key only. A buffer of another size than its record
    is ``Absence.CORRUPT``. ``close`` is idempotent.
    """

    def put(self, headers: Sequence[RecordHeader], payloads: Sequence[Buffer]) -> list[bool]: ...

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[RecordHeader | Absence]: ...

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]: ...

    def delete(self, keys: Sequence[BlockKey]) -> None: ...

    def flush(self) -> None:
        """Return when every record put before is on stable storage, as far as this backend has any."""

    def usage(self) -> Mapping[str, int]:
        """At least ``records``, ``used_nbytes``, ``free_nbytes``, ``capacity_nbytes``; used + free = capacity."""

    def close(self) -> None: ...


class RecordCarrier(Protocol):
    """Carries records between the blocks of one region and a store, in this process or in another.

    * Blocks are ids of the region that the carrier was made for. ``valid`` are a block's validity bits, 8 bytes a word,
      little-endian, as a record's header has them.
    * What it brings is verified: an :class:`Absence`, or the header of a record whose payload is in the block now.
    * Once a call has returned or raised, nobody reads or writes the blocks for it any more, in no process.

    A failure is ``StorageError``. Every call may be made from several threads and may take as long as the store does.
    """

    @property
    def counters(self) -> RecordCounters: ...

    def put(
        self, keys: Sequence[BlockKey], blocks: Sequence[int], valid: Sequence[bytes], generations: Sequence[int]
    ) -> list[bool]:
        """Store the blocks' records; ``True`` where the record is stored now, ``False`` where there was no room."""

    def get_into(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> list[RecordHeader | Absence]:
        """Fill the blocks; after an absence a block's bytes mean nothing."""

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Which keys seem to have a record; only reading verifies."""

    def flush(self) -> None:
        """Return when every record put before is on stable storage, as far as the store has any."""


class Copier(Protocol):
    """Copies the records of blocks from region to region, in this process or in another.

    ``sources`` and ``targets`` are block ids, pairwise; a source may serve several targets. When ``copy`` returns every
    byte is in place; when it raises nobody writes the targets any more, whose bytes then mean nothing.
    """

    def copy(self, source: Region, target: Region, sources: Sequence[int], targets: Sequence[int]) -> None: ...


class BlockMover(Protocol):
    """Moves whatever an engine keeps for its blocks: :class:`AuxBlocks` moves rows, the engine's own mover the KV.

    Both get the very same pairs. A call succeeds whole or raises and has changed nothing that anyone owns. ``persist``
    and ``restore`` are called from store threads, beside everything else: nobody else writes their blocks meanwhile,
    and once they have returned or raised the mover does not touch the blocks for them any more.
    """

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy device blocks to host blocks; pairs are (device block, host block)."""

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy host blocks to device blocks; pairs are (host block, device block)."""

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy device blocks to device blocks; pairs are (source, target)."""

    def persist(self, blocks: Mapping[BlockKey, int]) -> dict[BlockKey, bool]:
        """Store device blocks under their keys; ``True`` where the content is stored now."""

    def restore(self, blocks: Mapping[BlockKey, int]) -> dict[BlockKey, bool]:
        """Fill device blocks with what is stored under their keys; ``False`` leaves the block without content."""


__all__ = ["Absence", "BlockMover", "Copier", "HitPolicy", "Lookup", "RecordCarrier", "Region", "StorageBackend"]
