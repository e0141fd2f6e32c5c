"""Movers: rows between regions and a store, and rows and KV as one.

:class:`RowsMover` moves one kind of record. :class:`PairMover` moves two kinds, which are kept in stores that evict and
fail each on its own, and keeps the law of pairs. A **pair** is KV and rows of one origin under one key; it is *whole*
when every required row is valid.

* A whole pair that is stored stays, and its origin is the answer. So engines on one pool do not replace each other's.
* A pair that is not whole is replaced by one that is, both parts.
* Rows come back beside KV of their own origin only, whatever the two stores hold.

Nothing makes two stores change at once: a put beside another engine's put of the same key may leave parts of two
origins. They are never handed out as a pair, and the next put makes the pair whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from cache_manager.bits import full_bits
from cache_manager.errors import StorageError
from cache_manager.keys import BlockKey
from cache_manager.memory import Copies, Records
from cache_manager.ports import Absence, BlockRecords, Found, HitPolicy, Mover, RecordCounters, TierName
from cache_manager.record import RecordHeader
from cache_manager.spec import RecordLayout
from cache_manager.storage.records import RecordStore

_T = TypeVar("_T")


class RowsMover:
    """A :class:`Mover` of records that lie in regions of one layout, and in ``records`` if there is a store.

    With ``whole`` every record counts as complete, whatever rows the caller says are valid: KV has no rows of its own.
    """

    __slots__ = ("_layout", "_records", "_regions", "_whole")

    def __init__(
        self, device: Records, host: Records | None, records: RecordStore | None, *, whole: bool = False
    ) -> None:
        self._regions: dict[TierName, Records | None] = {"device": device, "host": host}
        self._records = records
        self._layout = layout = device.layout
        self._whole = (
            np.tile(full_bits(layout.block_tokens), len(layout.specs)).astype("<u8").tobytes() if whole else b""
        )

    def over(self, records: NDArray[np.uint8]) -> RowsMover:
        """The same store, for ``records`` ``[n, layout.nbytes]`` that are a copy of some blocks'."""
        return RowsMover(Copies(self._layout, records), None, self._records)

    @property
    def stores(self) -> bool:
        return self._records is not None

    @property
    def counters(self) -> RecordCounters:
        """The store's; all zero without one."""
        return RecordCounters() if self._records is None else self._records.counters

    def copy(self, source: TierName, target: TierName, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Records are copied pair by pair, neighbours at once; a fancy index would gather them first."""
        given, taken = self._regions[source], self._regions[target]
        assert given is not None and taken is not None, f"{source} to {target}: a tier that there is"  # noqa: PT018
        assert len(sources) == len(targets), f"{len(sources)} sources, {len(targets)} targets"
        assert given is not taken or not np.isin(targets, sources).any(), "a block is source and target"
        if not len(sources):
            return
        rows, into = given.rows, taken.rows
        apart = (np.diff(sources) != 1) | (np.diff(targets) != 1)
        edges = [0, *(np.flatnonzero(apart) + 1).tolist(), sources.size]
        first, to = sources.tolist(), targets.tolist()
        if len(edges) == sources.size + 1:  # no two are neighbours
            for s, t in zip(first, to, strict=True):
                into[t] = rows[s]
            return
        for a, b in pairwise(edges):
            into[to[a] : to[a] + b - a] = rows[first[a] : first[a] + b - a]

    def put(self, records: BlockRecords, *, replace: bool = False) -> list[Found | None]:
        if self._records is None or not records.keys:
            return [None] * len(records.keys)
        valid = [self._whole] * len(records.keys) if self._whole else records.valid
        with self._views(records.blocks) as views:
            stored = self._records.put(
                records.keys, views, valid, records.generations, records.origins, replace=replace
            )
        return [None if header is None else self._found(header) for header in stored]

    def get_into(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> list[Found | Absence]:
        if self._records is None or not keys:
            return [Absence.MISS] * len(keys)
        with self._views(blocks) as views:
            found = self._records.get_into(keys, views)
        return [self._found(each) if isinstance(each, RecordHeader) else each for each in found]

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [False] * len(keys) if self._records is None else self._records.contains(keys)

    def flush(self) -> None:
        if self._records is not None:
            self._records.flush()

    def _found(self, header: RecordHeader) -> Found:
        return Found(header.origin, b"" if self._whole else header.valid)

    @contextmanager
    def _views(self, blocks: Sequence[int]) -> Iterator[list[memoryview]]:
        """The device blocks' records; let go in the end, also where an exception keeps the store's frames."""
        device = self._regions["device"]
        assert device is not None
        views: list[memoryview] = []
        try:
            views += [device.rows[block].data for block in blocks]
            yield views
        finally:
            for view in views:
                with suppress(BufferError):  # the store has kept it
                    view.release()


class PairMover:
    """A ``Mover`` of two movers: ``rows``, of records of ``layout``, and ``kv``, which ignores rows' validity.

    With ``gate`` a block counts when both parts are there: blocks with every row of the ``required`` specs, by their
    indices, are put, and of keys, which are a prefix, as many are brought as have both parts from the first on;
    where they are of two origins, that key's answer is ``Absence.ORIGIN``, and nothing is brought for those behind.
    With ``mask`` KV decides: every block's KV is put and brought, rows where there are any, and what is answered
    without rows has ``valid=b""``. Safe from several threads.
    """

    __slots__ = ("_kv", "_policy", "_required", "_rows")

    def __init__(
        self, rows: Mover, kv: Mover, policy: HitPolicy, layout: RecordLayout, required: Sequence[int]
    ) -> None:
        self._rows = rows
        self._kv = kv
        self._policy = policy
        width, full = 64 * layout.valid_words, (1 << layout.block_tokens) - 1
        self._required = sum(full << width * index for index in set(required))

    @property
    def stores(self) -> bool:
        return self._rows.stores and self._kv.stores

    @property
    def counters(self) -> RecordCounters:
        """Of the rows' store."""
        return self._rows.counters

    def copy(self, source: TierName, target: TierName, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        self._rows.copy(source, target, sources, targets)
        self._kv.copy(source, target, sources, targets)

    def put(self, records: BlockRecords, *, replace: bool = False) -> list[Found | None]:
        """What :meth:`get_into` would bring for each key, as far as ``put`` of the two movers says so."""
        gated = self._policy == "gate"
        asked = [i for i, bits in enumerate(records.valid) if not gated or self._is_whole(bits)]
        kv, rows = self._put_parts(records, asked, replace=replace)
        if not replace:
            whole = [i for i in asked if self._is_whole(records.valid[i])]
            torn = [i for i in whole if not self._is_pair(kv.get(i), rows.get(i))]
            again = [i for i in torn if any(p and p.origin != records.origins[i] for p in (kv.get(i), rows.get(i)))]
            more_kv, more_rows = self._put_parts(records, again, replace=True)
            for part, more in ((kv, more_kv), (rows, more_rows)):
                for i in again:  # what was there before may be gone
                    part.pop(i, None)
                part.update(more)
            if gated:
                rows |= self._still(self._rows, records, list(more_rows))
            else:
                torn = [i for i, part in rows.items() if part.origin != kv[i].origin]
                kv |= self._still(self._kv, records, list({*more_kv, *torn}))
        return [self._answer(kv.get(i), rows.get(i)) for i in range(len(records.keys))]

    def get_into(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> list[Found | Absence]:
        return (self._get_gated if self._policy == "gate" else self._get_masked)(keys, blocks)

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        there = one_each(self._kv.contains(keys), keys)
        if self._policy == "mask":
            return there
        return [a and b for a, b in zip(one_each(self._rows.contains(keys), keys), there, strict=True)]

    def flush(self) -> None:
        self._rows.flush()
        self._kv.flush()

    def _put_parts(
        self, records: BlockRecords, wanted: Sequence[int], *, replace: bool
    ) -> tuple[dict[int, Found], dict[int, Found]]:
        """What is stored of KV and of rows; the part without which the other is of no use goes first."""

        def put(mover: Mover, some: Sequence[int]) -> dict[int, Found]:
            answers = one_each(mover.put(records.only(some), replace=replace), some) if some else []
            return {i: found for i, found in zip(some, answers, strict=True) if found is not None}

        if self._policy == "gate":
            rows = put(self._rows, wanted)
            return put(self._kv, list(rows)), rows
        kv = put(self._kv, wanted)
        useful = [i for i, part in kv.items() if part.origin == records.origins[i] or self._is_whole(records.valid[i])]
        return kv, put(self._rows, [i for i in useful if any(records.valid[i])])

    def _still(self, first: Mover, records: BlockRecords, some: Sequence[int]) -> dict[int, Found]:
        """What is stored now of the parts that went first: a writer may have replaced them before the others came."""
        now = one_each(first.put(records.only(some)), some) if some else []
        return {i: found if found is not None else Found(0, b"") for i, found in zip(some, now, strict=True)}

    def _answer(self, kv: Found | None, rows: Found | None) -> Found | None:
        if self._policy == "gate":
            return rows if self._is_pair(kv, rows) else None
        if kv is not None and rows is not None and kv.origin == rows.origin != 0:
            return rows
        return None if kv is None else Found(kv.origin, b"")

    def _get_gated(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> list[Found | Absence]:
        answers: list[Found | Absence] = [Absence.MISS] * len(keys)
        count = _run(one_each(self._rows.contains(keys), keys))
        rows = one_each(self._rows.get_into(keys[:count], blocks[:count]), keys[:count]) if count else []
        answers[: len(rows)] = [found if isinstance(found, Absence) else Absence.MISS for found in rows]
        whole = [isinstance(found, Found) and self._is_whole(found.valid) for found in rows]
        run = _run(whole)
        kv = one_each(self._kv.get_into(keys[:run], blocks[:run]), keys[:run]) if run else []
        for i, (part, beside) in enumerate(zip(kv, rows[:run], strict=True)):
            if isinstance(part, Absence):
                answers[i] = part
                break
            if not self._is_pair(part, beside):
                answers[i] = Absence.ORIGIN
                break
            answers[i] = beside
        return answers

    def _get_masked(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> list[Found | Absence]:
        answers = one_each(self._kv.get_into(keys, blocks), keys)
        there = [(i, part) for i, part in enumerate(answers) if isinstance(part, Found)]
        rows = self._rows.get_into([keys[i] for i, _ in there], [blocks[i] for i, _ in there]) if there else []
        for (i, part), beside in zip(there, one_each(rows, there), strict=True):
            ours = isinstance(beside, Found) and beside.origin == part.origin != 0
            answers[i] = beside if ours else Found(part.origin, b"")
        return answers

    def _is_whole(self, valid: bytes) -> bool:
        return int.from_bytes(valid, "little") & self._required == self._required

    def _is_pair(self, kv: Found | Absence | None, rows: Found | Absence | None) -> bool:
        """Whether these are the parts of a whole pair. Origin 0 is unknown, and like no other."""
        if not isinstance(kv, Found) or not isinstance(rows, Found):
            return False
        return kv.origin == rows.origin != 0 and self._is_whole(rows.valid)


def one_each(answers: list[_T], asked: Sequence[object]) -> list[_T]:
    """``answers``, which have to be one for each of ``asked``: by position they would be taken for others' answers."""
    if len(answers) != len(asked):
        raise StorageError(f"a mover answered {len(answers)} of {len(asked)} keys")
    return answers


def _run(there: Sequence[bool]) -> int:
    """How many are there from the first one on.

    >>> _run([True, True, False, True])
    2
    """
    return there.index(False) if False in there else len(there)
