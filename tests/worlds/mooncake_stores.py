"""Stores of a Mooncake pool whose deadlines are short, and what tests of its faults ask of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from mooncake_pool import Master
from waiting import GIVE_UP_S, until

from cache_manager.errors import StorageError
from cache_manager.ports import Absence
from cache_manager.storage import open_store
from cache_manager.storage.mooncake import MooncakeStore
from cache_manager.storage.records import RecordStore
from cache_manager.testing.records import get, key_of, payload_of, put

TIMEOUT_MS = 1_000
HANG_S = GIVE_UP_S
"""What stops here stops for good: a call that no deadline ends takes longer than this, on any machine."""
CALM_MS = 30_000
"""Where nothing hangs: a machine that stands still for a second fails no call."""
SEGMENT_NBYTES = 1 << 20


def opened(master: Master, **parameters: object) -> MooncakeStore:
    wanted = {"timeout_ms": TIMEOUT_MS, "full_ms": 300, **parameters}
    store = open_store(master.url(**wanted))
    assert isinstance(store, MooncakeStore)
    return store


def pid_of(store: MooncakeStore) -> int:
    """Of the native client's process of the moment."""
    assert store.pid is not None
    return store.pid


def timed(call: Callable[[], object]) -> object:
    """The answer or the :class:`StorageError`; a call that hangs fails the test."""
    begun_s = time.monotonic()
    try:
        answer = call()
    except StorageError as error:
        answer = error
    took_s = time.monotonic() - begun_s
    assert took_s < HANG_S, f"{took_s:.1f} s: {answer}"
    return answer


def stored(store: RecordStore, numbers: Sequence[int]) -> None:
    """Returns when all are stored, before anything is broken."""
    until(lambda: timed(lambda: put(store, numbers)) == [True] * len(numbers), what="all are stored")


def name_of(number: int) -> str:
    return f"test/3/{key_of(number).hex()}"


def stores_again(store: RecordStore, number: int) -> bool:
    """Whether a record can be put and read; none is ever read wrong."""
    stored = timed(lambda: put(store, [number]))
    answer = timed(lambda: get(store, [number]))
    assert isinstance(answer, StorageError) or answer[0] in (payload_of(number), Absence.MISS)
    return stored == [True] and answer == [payload_of(number)]
