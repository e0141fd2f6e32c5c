"""What the cache manager asks of the world: small structural interfaces, each with its contract.

A contract is executable: ``cache_manager.testing`` ships the test classes that any implementation subclasses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Literal, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from cache_manager.keys import BlockKey
from cache_manager.record import Buffer, RecordHeader
from cache_manager.slots import Bytes, Ints
from cache_manager.spec import AuxBlockDataSpec, RecordLayout

TierName = Literal["device", "host"]
"""Where blocks are: on the device, or on the host, to which they are swapped."""


class Absence(Enum):
    """Why a record did not come back."""

    MISS = "miss"
    CORRUPT = "corrupt"


class Region(Protocol):
    """Memory for the records of ``blocks`` blocks, with what a reader needs to check what it read.

    ``words[b]`` is ``generation << 16 | sequence``, ``valid[b, spec, w]`` has a bit for each row.
    :mod:`cache_manager.publish` has the order of changes and of reads without a lock. The arrays are writable and
    C-contiguous. They stay valid until :meth:`close`, which raises ``BufferError`` while a view of them is still alive.
    """

    layout: RecordLayout
    blocks: int
    rows: Bytes  # [blocks, layout.nbytes]
    words: NDArray[np.uint64]  # [blocks]
    valid: NDArray[np.uint64]  # [blocks, specs, valid_words]

    @property
    def is_sparse(self) -> bool:
        """Whether a block's rows have memory between :meth:`hold` and :meth:`give_back` alone; else always."""

    def hold(self, ids: NDArray[np.int64]) -> None:
        """Have memory for the rows of blocks ``ids [n]``. Raises ``NoSpaceError``, and then has it for some at most."""

    def give_back(self, ids: NDArray[np.int64], held: NDArray[np.bool_]) -> None:
        """The rows of blocks ``ids [n]`` are over; their memory goes, but for pages of ``held [blocks]`` ones."""

    def enter(self, namespace: bytes) -> None:
        """Rows belong to another namespace (its fingerprint) from here on.

        Call it only after clearing every block's bits and changing its word.
        """

    def close(self) -> None: ...


class StorageBackend(Protocol):
    """A store of block records by key: one record a key.

    * A record is visible whole or not at all, also after a crash. ``put`` has copied the payloads when it returns;
      ``get_into`` fills the whole buffer or reports an absence, after which the buffer's content means nothing.
    * ``put`` returns, key by key, the header of the record that is stored under the key when it returns, or ``None`` if
      none is, for lack of room. If this call stored the record, that is the offered header, the same object. Of an
      older record only the header was read; if its payload is damaged, a read finds that.
    * If a stored key is put again, a record of the same origin gives way to one that has all of its valid rows and
      more, a record of another origin only with ``replace``; otherwise it stays
      (:func:`cache_manager.record.takes_the_place`).
    * A read may return any record that was put under the key and not deleted since: an older one after a power cut, or
      if one of several places has made room. Deleted records are gone when ``delete`` returns, unless one is copied
      from place to place meanwhile; if it raises, nothing is promised.

    A miss is an :class:`Absence`, a failure is ``StorageError``; nothing else is returned. Every call is safe from
    several threads. One bad key fails that key only. A buffer of another size than its record is ``Absence.CORRUPT``.
    ``close`` is idempotent.
    """

    def put(
        self, headers: Sequence[RecordHeader], payloads: Sequence[Buffer], *, replace: bool = False
    ) -> list[RecordHeader | None]: ...

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[RecordHeader | Absence]: ...

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]: ...

    def delete(self, keys: Sequence[BlockKey]) -> None: ...

    def flush(self) -> None:
        """Return when every record put before is on stable storage, if this backend has any."""

    def usage(self) -> Mapping[str, int]:
        """At least ``records``, ``used_nbytes``, ``free_nbytes``, ``capacity_nbytes``; used + free = capacity."""

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Close; :class:`cache_manager.storage.guard.ClosingStore` has both methods."""


@runtime_checkable
class BoundedBackend(Protocol):
    """A :class:`StorageBackend` that knows at opening how large a record's payload may be."""

    @property
    def record_nbytes_max(self) -> int: ...


@dataclass(frozen=True, slots=True)
class RecordCounters:
    """What a store of one layout's records has done so far; every record asked for is a hit, a miss or corrupt.

    Of the records put: ``stored`` by this store; ``kept``, because the key had one of the same origin already;
    ``conflicts``, where one of another origin stayed; ``refused``, after which nothing is stored under the key.
    """

    stored: int = 0
    kept: int = 0
    conflicts: int = 0
    refused: int = 0
    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    quarantine_failures: int = 0
    put_nbytes: int = 0
    get_nbytes: int = 0


class KVBlocks(Protocol):
    """The KV of blocks whose rows are here, where kvroute itself moves and stores both: one more spec of the record.

    * ``spec`` lays a block's bytes out; its name differs from every other spec's, and a block of it is stored whole or
      not at all.
    * ``copy`` takes block ids of two tiers, pairwise; a source may serve several targets. When it returns, every byte
      is in place for whatever the engine runs next; when it raises, the targets' bytes mean nothing.
    * ``take`` copies the bytes of device blocks out and ``fill`` copies them in, ``[n, spec.block_nbytes]``; both are
      called between two of the engine's own uses of these blocks, and have ended when they return. The set's lock is
      held meanwhile: its other calls wait.
    * ``n`` may be 0 for all three, and nothing is done then.

    Their errors reach the caller of the move or the store: nothing has arrived then.
    """

    @property
    def spec(self) -> AuxBlockDataSpec: ...

    def copy(self, source: TierName, target: TierName, sources: Ints, targets: Ints) -> None: ...

    def take(self, blocks: Ints, into: Bytes) -> None: ...

    def fill(self, blocks: Ints, given: Bytes) -> None: ...
