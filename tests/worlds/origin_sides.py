"""Two engines over one store whose puts come out as a test has planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from kv import NBYTES, SlotKV

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import StorageError
from cache_manager.keys import BlockKey, Namespace
from cache_manager.record import Buffer, RecordHeader
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from cache_manager.storage.records import RecordStore
from cache_manager.testing.faults import FaultyStore

DEVICE, HOST, TOKENS = 3, 2, 3
SPEC = AuxBlockDataSpec("routing", (2, 3), "uint8", TOKENS)
KV_SPEC = AuxBlockDataSpec("kv", (NBYTES,), "uint8", TOKENS)
LAYOUT = RecordLayout((SPEC, KV_SPEC))


class PlannedStore(FaultyStore):
    """A store whose next puts come out as ``plan`` says: fail, are refused, come after a rival's, or fail once done."""

    plan: Sequence[str | None] = ()
    rival: Callable[[], None]

    def put(
        self, headers: Sequence[RecordHeader], payloads: Sequence[Buffer], *, replace: bool = False
    ) -> list[RecordHeader | None]:
        outcome, self.plan = (*self.plan, None)[0], self.plan[1:]
        if outcome == "fail":
            raise StorageError("put failed on purpose")
        if outcome == "refuse":
            return [None] * len(headers)
        if outcome == "rival":
            self.rival()
        answers = super().put(headers, payloads, replace=replace)
        if outcome == "torn":
            raise StorageError("put failed when it was done, on purpose")
        return answers

    def record(self, key: BlockKey) -> tuple[RecordHeader, np.ndarray, np.ndarray, np.ndarray] | None:
        """What is stored now: the header, rows ``[tokens, 2, 3]``, which are valid, and KV ``[tokens, NBYTES]``."""
        payload = np.zeros(LAYOUT.nbytes, np.uint8)
        (header,) = RecordStore(self.backend, LAYOUT).get_into([key], [payload.data])
        if not isinstance(header, RecordHeader):
            return None
        rows, kv = (
            payload[at : at + spec.block_nbytes].reshape(TOKENS, *spec.row_shape)
            for at, spec in zip(LAYOUT.offsets, LAYOUT.specs, strict=True)
        )
        valid = (np.frombuffer(header.valid, "<u8")[0] >> np.arange(TOKENS, dtype=np.uint64)) & np.uint64(1)
        return header, rows, valid.astype(bool), kv


class KV(SlotKV):
    """KV whose filling fails on demand, after the first half has been filled."""

    fill_fails = False

    def fill(self, blocks: np.ndarray, given: np.ndarray) -> None:
        if self.fill_fails:
            flat = self.device.reshape(len(self.device), -1)
            flat[blocks, : flat.shape[1] // 2] = given[:, : flat.shape[1] // 2]
            raise StorageError("filling KV in failed on purpose")
        super().fill(blocks, given)


class Side:
    """One engine: rows and KV, over a store that outlives it."""

    def __init__(self, store: PlannedStore, required: Sequence[str], version: int) -> None:
        self.kv = KV(DEVICE, HOST, TOKENS)
        self.aux = AuxBlocks(
            [SPEC],
            blocks=DEVICE,
            host_blocks=HOST,
            namespace=Namespace("m", version),
            store=store,
            kv=self.kv,
            required=required,
        )

    def key(self, n: int) -> BlockKey:
        return self.aux.keys.key(None, [n])

    def life(self, block: int) -> int:
        """The generation that the block is in; it is given out if it never was."""
        return int(self.aux.generations([block])[0]) or self.renewed(block)

    def renewed(self, block: int) -> int:
        return int(self.aux.renew([block])[0])
