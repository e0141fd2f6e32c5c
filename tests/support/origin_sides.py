"""Two engines over stores of rows and of KV whose puts come out as a test has planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kv import SlotKV

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import StorageError
from cache_manager.keys import BlockKey, Namespace
from cache_manager.ports import BlockRecords, Found, HitPolicy
from cache_manager.record import Buffer, RecordHeader
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.testing.faults import FaultyStore

DEVICE, HOST, TOKENS = 3, 2, 3
SPEC = AuxBlockDataSpec("routing", (2, 3), "uint8", TOKENS)


class Planned:
    """A part of a store whose next puts come out as ``plan`` says."""

    plan: Sequence[str | None] = ()
    rival: Callable[[], None]

    def planned(self, put: Callable[[], list[Any]], n: int) -> list[Any]:
        outcome, self.plan = (*self.plan, None)[0], self.plan[1:]
        if outcome == "fail":
            raise StorageError("put failed on purpose")
        if outcome == "refuse":
            return [None] * n
        if outcome == "rival":
            self.rival()
        return put()


class RowsStore(Planned, FaultyStore):
    def put(
        self, headers: Sequence[RecordHeader], payloads: Sequence[Buffer], *, replace: bool = False
    ) -> list[RecordHeader | None]:
        return self.planned(lambda: FaultyStore.put(self, headers, payloads, replace=replace), len(headers))


class KV(Planned, SlotKV):
    def put(self, records: BlockRecords, *, replace: bool = False) -> list[Found | None]:
        return self.planned(lambda: SlotKV.put(self, records, replace=replace), len(records.keys))


class Side:
    """One engine: rows and KV, over stores that outlive it."""

    def __init__(self, store: RowsStore, stored: dict, policy: HitPolicy, version: int) -> None:
        self.kv = KV(DEVICE, HOST, TOKENS)
        self.kv.stored = stored
        self.aux = AuxBlocks(
            [SPEC],
            device_blocks=DEVICE,
            host_blocks=HOST,
            namespace=Namespace("m", version),
            store=store,
            kv=self.kv,
            policy=policy,
        )

    def key(self, n: int) -> BlockKey:
        return self.aux.keys.key(None, [n])

    def held(self, block: int) -> bool:
        """Whether somebody holds the block; if not, it is given to an owner of its own."""
        if self.aux.available([block])[0]:
            self.aux.allocate([block], f"owner {block}")
        return bool(self.aux.holds(f"owner {block}", block))

    def emptied(self, block: int) -> bool:
        """Whether the block is held, in a new life."""
        self.aux.free(f"owner {block}")
        return self.held(block)
