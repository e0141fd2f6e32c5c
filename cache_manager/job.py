"""One job: blocks to the store, or back, on a copy.

A persist stores the blocks' content at its begin, a restore lands in blocks that have not changed since. So a store
that hangs costs a thread and the bytes of the copy (*staging*), and a failed or cancelled job has changed nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import compress
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy import count_nonzero as count

from cache_manager.errors import BlockStateError
from cache_manager.keys import BlockKey
from cache_manager.own_keys import Keyed, OwnKeys
from cache_manager.ports import Absence, KVBlocks
from cache_manager.publish import bits_in, bits_of, copies_of, have_all, have_none
from cache_manager.record import RecordHeader
from cache_manager.slots import Bits, Blocks, Bytes, Flags, Ints
from cache_manager.storage.records import RecordStore
from cache_manager.table import BlockTable

_T = TypeVar("_T")


class Phase(Enum):
    QUEUED = "queued"
    CARRYING = "carrying"
    CARRIED = "carried"
    LANDED = "landed"


class JobQueue(Protocol):
    """What a job asks of its :class:`~cache_manager.jobs.Jobs`, the one class that has these.

    It has a name here so that no import goes in a circle.
    """

    table: BlockTable
    own_keys: OwnKeys
    required: Sequence[int]
    kv: KVBlocks | None

    def records(self) -> RecordStore: ...
    def land(self, job: AnyJob, landed: deque[AnyJob], /) -> None: ...
    def sleep(self, reached: Callable[[], bool], timeout_s: float) -> bool: ...
    def cancel(self, job: AnyJob) -> None: ...


class Job(Generic[_T]):
    """The store's work for some blocks; ``keys`` and ``ids [n]`` are those that take part."""

    name: str
    no_answer: Any
    """The answer for a block that does not take part."""
    refused: str
    """The counter of blocks whose job had no room."""

    def __init__(self, jobs: JobQueue, blocks: Keyed, generations: Blocks) -> None:
        """Lock held. A block in another life or a key of another namespace gets ``no_answer``. Nothing is counted yet:
        the job may be refused."""
        self.jobs = jobs
        self.table = jobs.table
        self.store = jobs.records()
        ids, lives, current, self.unresolved = jobs.own_keys.resolve(self.table, blocks, generations)
        self.blocks = dict(blocks)
        self.begun_s = time.monotonic()
        self.cancelled = False
        self.failure: BaseException | None = None  # the store's; known once the job has been carried
        self.answers: dict[BlockKey, _T] = dict.fromkeys(blocks, self.no_answer)
        self.not_restored: dict[str, int] = {}
        """Blocks in the same life that did not come back, by the counter that says why; set on landing."""
        self.incomplete = 0
        """Current blocks that are not stored, because they lack something that is required."""
        which = self.wanted(ids, current)
        self.keys = list(compress(blocks, which.tolist()))
        self.ids = ids[which]
        self.lives = lives[which]
        self.drops = self.table.drops.take(self.ids)
        self.nbytes = len(self.keys) * jobs.own_keys.record.nbytes
        self.phase = Phase.QUEUED if self.keys else Phase.LANDED

    # What a kind of job does, in this order. The lock is held, but not in carry().

    def wanted(self, ids: Ints, current: Flags, /) -> Flags:
        """Which of the ``current`` blocks ``ids [n]`` take part."""
        raise NotImplementedError

    def stage(self) -> None:
        shape = (self.ids.size, self.jobs.own_keys.record.nbytes)
        self.staging = np.zeros(shape, np.uint8)

    def carry(self) -> None: ...
    def land(self) -> None: ...

    def staged_kv(self, kv: KVBlocks) -> Bytes:
        """The part of the staging that KV takes, ``[n, kv.spec.block_nbytes]``."""
        first = self.table.layout.nbytes
        return self.staging[:, first : first + kv.spec.block_nbytes]

    # What callers do with a job.

    @property
    def over(self) -> bool:
        return self.phase is Phase.LANDED

    def poll(self) -> bool:
        """Land the job if the store's part is done; whether the job is over. Never waits for the store.

        Its caller knows then: ``AuxBlocks.jobs.poll`` does not return the job.
        """
        self.jobs.land(self, deque())
        return self.over

    def wait(self, timeout_s: float) -> bool:
        """:meth:`poll` as soon as that ends the job, or when ``timeout_s`` is over."""
        self.jobs.sleep(lambda: self.phase in (Phase.CARRIED, Phase.LANDED), timeout_s)
        return self.poll()

    def cancel(self) -> None:
        """Cancel the job. A queued job is over at once, another at the first poll after the store call has ended."""
        self.jobs.cancel(self)
        self.poll()

    def result(self) -> dict[BlockKey, _T]:
        """The answers by key. Raises what the store raised, and :class:`BlockStateError` before the job is over."""
        if not self.over:
            raise BlockStateError("job", "one that has landed", f"one that is {self.phase.value}")
        if self.failure is not None:
            raise self.failure
        return self.answers


class PersistJob(Job[int]):
    """Blocks on their way to the store. The answer: the origin now stored under the key, 0 for none."""

    name = "persist"
    no_answer = 0
    refused = "refused_blocks_not_persisted"

    def wanted(self, ids: Ints, current: Flags, /) -> Flags:
        table = self.table
        whole = have_all(table.region, ids, self.jobs.required)
        if self.jobs.kv is None:
            whole &= ~have_none(table.region, ids)  # nothing is required, and nothing is there
        else:
            whole &= table.fillable(ids)  # KV that is being copied, or written by a pass, is not whole yet
        self.incomplete = int(count(current & ~whole))
        return current & whole

    def stage(self) -> None:
        table = self.table
        kv = self.jobs.kv
        table.origins.fix(self.ids)
        words = bits_of(table.region, self.ids)
        copies = copies_of(table.region, self.ids, words)
        if kv is None:
            self.staging = copies
        else:
            super().stage()
            self.staging[:, : table.layout.nbytes] = copies
            kv.take(self.ids, self.staged_kv(kv))
            shape = (self.ids.size, 1, words.shape[2])
            whole = np.broadcast_to(table.full, shape)
            words = np.append(words, whole, axis=1)
        self.valid = words.astype("<u8")
        self.origins = table.origins.names.take(self.ids)

    def carry(self) -> None:
        views = [row.data for row in self.staging]
        valid = [words.tobytes() for words in self.valid]
        lives = self.lives.tolist()
        origins = self.origins.tolist()
        parts: tuple[Any, ...] = (self.keys, views, valid, lives, origins)
        headers = self.store.put(*parts)
        less: list[int] = []
        for i, header in enumerate(headers):
            if header and header.valid != valid[i] and self._lacks(header):
                less.append(i)
        if less:
            again = ([part[i] for i in less] for part in parts)
            replaced = self.store.put(*again, replace=True)
            for i, header in zip(less, replaced, strict=True):
                headers[i] = header
        for key, header in zip(self.keys, headers, strict=True):
            if header:
                self.answers[key] = header.origin

    def _lacks(self, header: RecordHeader) -> bool:
        """Whether an engine with fewer required specs has stored less than we need. Such a record would never be a hit
        here, so ours takes its place."""
        of_specs = bits_in(header.valid, self.table.region)
        bits = of_specs[self.jobs.required, :]
        return bool((bits != self.table.full).any())

    def land(self) -> None:
        persisted = sum(origin != 0 for origin in self.answers.values())
        self.table.lock.count("persisted_blocks", persisted)


class RestoreJob(Job[bool]):
    """Blocks on their way from the store. The answer: whether the block's rows have come back."""

    name = "restore"
    no_answer = False
    refused = "refused_blocks_not_restored"
    found: Sequence[RecordHeader | Absence] = ()

    def wanted(self, ids: Ints, current: Flags, /) -> Flags:
        _, once = self.table.slots.known(ids)
        return current & once  # a block is filled once

    def carry(self) -> None:
        if not self.cancelled:
            buffers = [row.data for row in self.staging]
            self.found = self.store.get_into(self.keys, buffers)

    def _read(self) -> tuple[Bits, Bits, Flags]:
        """What the store has answered: rows ``[n, specs, W]`` and origins ``[n]`` of the records, 0 for none, and which
        ones were corrupt."""
        region = self.table.region
        n = self.ids.size
        _, specs, words = region.valid.shape
        bits = np.zeros((n, specs, words), np.uint64)
        origins = np.zeros(n, np.uint64)
        corrupt = np.zeros(n, np.bool_)
        for i, header in enumerate(self.found):
            if isinstance(header, RecordHeader):
                origins[i] = header.origin
                bits[i] = bits_in(header.valid, region)
            corrupt[i] = header is Absence.CORRUPT
        return bits, origins, corrupt

    def land(self) -> None:
        """Make the read records readable in blocks

        * that nothing was done to since the begin, or is being done;
        * that have no readable row, and no origin of their own;
        * whose KV is of the record's origin, or of none that is known;
        * of which the record has every row that is required.
        """
        table = self.table
        kv = self.jobs.kv
        ids = self.ids
        unchanged = table.drops.take(ids) == self.drops
        unchanged &= table.fillable(ids)
        unchanged &= have_none(table.region, ids)
        unchanged &= ~table.origins.own.take(ids)
        unchanged &= not self.cancelled
        bits, origins, corrupt = self._read()
        known = table.origins.names.take(ids)  # of the KV, where the engine has named it
        is_taken = (known == 0) | (known == origins)
        arrived = unchanged & (origins != 0) & is_taken
        required = bits[:, self.jobs.required, :]
        is_full = required == table.full
        arrived &= is_full.all(axis=(1, 2))
        interrupted = False
        try:
            if kv is not None and count(arrived):
                content = self.staged_kv(kv)[arrived]
                kv.fill(ids[arrived], content)
            records = self.staging[arrived, : table.layout.nbytes]
            table.fill(ids[arrived], records, bits[arrived], origins[arrived])
        except BaseException as error:  # noqa: BLE001 (it is not lost: it comes with the result)
            self.failure = error.with_traceback(None)
            interrupted = not isinstance(error, Exception)
            table.lose(ids[arrived])  # their KV is half written, so it is of no origin that others know
            arrived[:] = False
        self.answers.update(zip(self.keys, arrived.tolist(), strict=True))
        missing = unchanged & ~arrived
        if self.failure is not None:
            lost = {"failed_blocks_not_restored": missing}
        else:
            lost = {"corrupt_blocks_not_restored": missing & corrupt, "absent_blocks_not_restored": missing & ~corrupt}
        for why, which in lost.items():
            if count(which):
                self.not_restored[why] = int(count(which))
        counts = {
            "restored_blocks": int(count(arrived)),
            "late_restores_dropped": int(count((origins != 0) & ~unchanged)),
        }
        counts |= self.not_restored
        for name, n in counts.items():
            table.lock.count(name, n)
        if interrupted and self.failure is not None:
            raise self.failure


AnyJob = Job[Any]
