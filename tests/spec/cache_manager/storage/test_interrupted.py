"""A store whose call a signal handler has ended: right records or an error, until it is opened anew."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from shutil import rmtree

import pytest
from stopped import EVERY, is_stopped
from waiting import GIVE_UP_S

from cache_manager.errors import StorageError
from cache_manager.ports import StorageBackend
from cache_manager.storage import open_store
from cache_manager.storage.disk import Disk
from cache_manager.storage.file import FileReader, FileStore
from cache_manager.testing.records import BOTH, LAYOUT, Content, header_of, held, key_of, offer, payload_of

URLS = {
    "memory": "memory:?capacity=1MiB",
    "file": "file://{}?quota=2MiB",
    "tiered": "tiered:memory:?capacity=1MiB,file://{}?quota=2MiB",
}
X = Content(1, BOTH)
HEADERS = [header_of(0, origin=2), header_of(7)]
PAYLOADS = [payload_of(0, origin=2), payload_of(7)]
KEYS = [key_of(0), key_of(1), key_of(7)]
WAIT_S = GIVE_UP_S

CALLS: dict[str, Callable[[StorageBackend], object]] = {
    "put": lambda store: store.put(HEADERS, PAYLOADS, replace=True),
    "get_into": lambda store: store.get_into(KEYS, [memoryview(bytearray(LAYOUT.nbytes)) for _ in KEYS]),
    "contains": lambda store: store.contains(KEYS),
    "delete": lambda store: store.delete(KEYS[:1]),
    "flush": lambda store: store.flush(),
    "usage": lambda store: store.usage(),
}


def _goes_on(store: StorageBackend, told: list[str]) -> None:
    """Records that no call was about are as they were, and what a put says is stored is found; or the store says that
    a call of it was interrupted."""
    try:
        assert offer(store, [(8, X)], replace=False) == [X]
        found = held(store, range(9))  # which compares payloads with headers
        assert found[8] == X
        assert found[1:3] == [X, X]
        store.flush()
        store.usage()
    except StorageError as error:
        told.append(str(error))
    try:
        store.close()
    except StorageError as error:
        told.append(str(error))


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("name", CALLS)
def test_a_store_that_was_interrupted_hangs_no_call_and_is_opened_anew(name: str, url: str, tmp_path: Path) -> None:
    """Goal: after a call that a signal handler has ended no call hangs, no record is another, and a file store loses
    none. Method: each call, interrupted at each possible place; then another thread puts, reads and closes. A file
    store is opened again, and the call is made again: a put is there, for readers too, and a deletion is done."""
    at, stopped = 1, True
    while stopped:
        path = tmp_path / str(at)
        store = open_store(URLS[url].format(path))
        offer(store, [(n, X) for n in range(6)], replace=False)
        stopped = is_stopped(partial(CALLS[name], store), at)
        errors: list[BaseException] = []
        told: list[str] = []
        rest = threading.Thread(target=_caught, args=(partial(_goes_on, store, told), errors), daemon=True)
        rest.start()
        rest.join(WAIT_S)
        assert not rest.is_alive(), f"{name}, interrupted at place {at}: a lock is still taken"
        assert not errors, f"{name}, interrupted at place {at}: {errors}"
        assert all("a call was interrupted in the middle: open the store anew" in each for each in told), told
        if url == "file":
            with FileStore(path, quota_nbytes=2 << 20) as again, FileReader(path) as reader:
                assert held(again, range(1, 6)) == [X] * 5, f"{name}, interrupted at place {at}"
                CALLS[name](again)
                there = again.contains(KEYS)
                assert there[1]
                assert there[0] == (name != "delete")
                assert there[2] or name != "put"
                assert reader.contains(KEYS) == there
                assert held(again, [0, 1, 7]) == held(reader, [0, 1, 7])
        rmtree(path, ignore_errors=True)
        at += EVERY
    assert at > 1 + EVERY * (url != "memory"), "it was never interrupted"


@pytest.mark.parametrize("url", ["memory", "file"])
def test_a_change_that_was_interrupted_ends_the_store(url: str, tmp_path: Path) -> None:
    """Goal: no answer from books that may be wrong. Method: a put interrupted at every single place; some of these are
    within a change, and then each later call names the remedy."""
    refused = 0
    for at in count(1):
        store = open_store(URLS[url].format(tmp_path / str(at)))
        offer(store, [(n, X) for n in range(6)], replace=False)
        if not is_stopped(partial(CALLS["put"], store), at):
            store.close()
            break
        told: list[str] = []
        _goes_on(store, told)
        refused += bool(told)
    assert refused


def test_a_call_inside_another_one_of_its_thread_is_an_error(tmp_path: Path) -> None:
    """Goal: a finaliser or a signal handler in the middle of a call hangs nobody. Method: the clock of a file store,
    which is read under its lock, asks the store; the next call is served."""
    asks: list[Callable[[], object]] = []

    def clock() -> float:
        if asks:
            with pytest.raises(StorageError, match="a call inside another one of its thread"):
                asks.pop()()
        return 1.0

    with FileStore(tmp_path, quota_nbytes=2 << 20, ttl_s=10.0, clock=clock) as store:
        offer(store, [(1, X)], replace=False)
        for call in (lambda: store.contains(KEYS), lambda: store.put(HEADERS[:1], PAYLOADS[:1])):
            asks.append(call)
            assert offer(store, [(1, X)], replace=False) == [X]
            assert not asks, "it was asked"
            assert store.contains(KEYS) == [False, True, False]


class StoppedDisk(Disk):
    """Whose next sync is interrupted if it ``stops``."""

    stops = False
    synced = 0

    def sync(self, fd: int) -> None:
        if self.stops:
            self.stops = False
            raise KeyboardInterrupt
        super().sync(fd)
        self.synced += 1


def test_what_an_interrupted_flush_has_not_synced_the_next_one_syncs(tmp_path: Path) -> None:
    disk = StoppedDisk()
    with FileStore(tmp_path, quota_nbytes=2 << 20, disk=disk) as store:
        offer(store, [(1, X)], replace=False)
        disk.synced = 0
        store.flush()
        files = disk.synced
        offer(store, [(2, X)], replace=False)
        disk.stops = True
        with pytest.raises(KeyboardInterrupt):
            store.flush()
        assert disk.synced == files
        store.flush()
        assert disk.synced > files


def _caught(call: Callable[[], None], errors: list[BaseException]) -> None:
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - for the main thread
        errors.append(error)
