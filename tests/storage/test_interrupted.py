"""A store whose call an exception from a signal handler has ended goes on serving, from any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from shutil import rmtree

import pytest
from stopped import EVERY, is_stopped
from waiting import GIVE_UP_S

from cache_manager.ports import StorageBackend
from cache_manager.storage import open_store
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


def _goes_on(store: StorageBackend) -> None:
    assert offer(store, [(8, X)], replace=False) == [X]
    found = held(store, range(9))  # which compares payloads with headers
    assert found[8] == X
    assert found[1:3] == [X, X], "records that no call was about"
    store.flush()
    store.usage()
    store.close()


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_interrupted_leaves_no_lock_taken(name: str, url: str, tmp_path: Path) -> None:
    """Goal: no call hangs after one that a signal handler has ended. Method: each call, interrupted at each possible
    place; then another thread puts, reads and closes."""
    at, stopped = 1, True
    while stopped:
        store = open_store(URLS[url].format(tmp_path / str(at)))
        offer(store, [(n, X) for n in range(6)], replace=False)
        stopped = is_stopped(partial(CALLS[name], store), at)
        errors: list[BaseException] = []
        rest = threading.Thread(target=_caught, args=(partial(_goes_on, store), errors), daemon=True)
        rest.start()
        rest.join(WAIT_S)
        assert not rest.is_alive(), f"{name}, interrupted at place {at}: a lock is still taken"
        assert not errors, f"{name}, interrupted at place {at}: {errors}"
        rmtree(tmp_path / str(at), ignore_errors=True)
        at += EVERY
    assert at > 1 + EVERY * (url != "memory"), "it was never interrupted"


@pytest.mark.parametrize("name", ["put", "delete"])
def test_a_call_that_is_made_again_after_an_interruption_is_done(name: str, tmp_path: Path) -> None:
    """Goal: what a put says is stored is there, for readers too, and what was deleted does not come back when the store
    is opened again. Method: a file store's call is interrupted at each possible place, and made again."""
    at, stopped = 1, True
    while stopped:
        with FileStore(path := tmp_path / str(at), quota_nbytes=1 << 20) as store, FileReader(path) as reader:
            offer(store, [(n, X) for n in range(6)], replace=False)
            assert reader.contains(KEYS) == [True, True, False]
            stopped = is_stopped(partial(CALLS[name], store), at)
            CALLS[name](store)
            there = [name == "put", True, name == "put"]
            assert store.contains(KEYS) == reader.contains(KEYS) == there, at
            assert held(store, [0, 7]) == held(reader, [0, 7]), at
        with FileStore(path, quota_nbytes=1 << 20) as store:
            assert store.contains(KEYS) == there, at
        rmtree(path)
        at += EVERY


def _caught(call: Callable[[], None], errors: list[BaseException]) -> None:
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - for the main thread
        errors.append(error)
