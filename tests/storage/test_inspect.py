"""``kvroute inspect``: what it says is there is what a reader finds, whatever is damaged, and beside a live writer."""

from __future__ import annotations

import json
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.errors import StoreMissingError
from cache_manager.keys import SCOPE_NBYTES, BlockKey
from cache_manager.record import RecordHeader
from cache_manager.spec import align
from cache_manager.storage.file import FileStore
from cache_manager.storage.inventory import inventory, stores_in
from cache_manager.testing.records import LAYOUT, header_of, key_of, payload_of, put
from kvroute.cli import USAGE, main
from tests.storage.stores import Clock, files, flip, opened

NOW_S = 1_700_000_000.0


def in_scope(scope: int, n: int) -> RecordHeader:
    """A record of another namespace."""
    header = header_of(n)
    key = BlockKey(bytes([scope]) * SCOPE_NBYTES + header.key[SCOPE_NBYTES:])
    return RecordHeader(key, *(getattr(header, name) for name in header.__struct_fields__[1:]))


@examples(25)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(0, 3), st.integers(0, 30)),
            st.tuples(st.just("delete"), st.integers(0, 3), st.integers(0, 30)),
            st.tuples(st.just("wait"), st.integers(0, 100_000), st.just(0)),
        ),
        max_size=40,
    )
)
def test_namespaces_ages_and_sizes_are_those_of_what_was_put(steps: list[tuple[str, int, int]]) -> None:
    """Method: any puts, deletions and waits, with room for all; a dict from key to scope says what has to be there."""
    clock, held = Clock(NOW_S), {}
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "s"
        with opened(directory, clock=clock) as store:
            for what, a, b in steps:
                if what == "wait":
                    clock.now_s += a
                    continue
                header = in_scope(a, b)
                if what == "put":
                    assert store.backend.put([header], [payload_of(b)]) == [header]
                    held[header.key] = a
                else:
                    store.backend.delete([header.key])
                    held.pop(header.key, None)
            live = inventory(directory, clock.now_s)
        for found in (live, inventory(directory, clock.now_s)):
            scopes = {share.name: share.records for share in found.namespaces}
            values = list(held.values())
            assert scopes == {(bytes([a]) * SCOPE_NBYTES).hex(): values.count(a) for a in set(values)}
            assert found.records == len(held) == sum(share.records for share in found.ages)
            assert found.nbytes == LAYOUT.nbytes * len(held) == sum(share.nbytes for share in found.sizes)
            assert all(extent.sound for extent in found.extents)
            assert sum(extent.nbytes for extent in found.extents) >= found.nbytes
            assert all(NOW_S <= share.oldest_s <= share.newest_s <= clock.now_s for share in found.namespaces)


@examples(20)
@given(seed=st.integers(0, 1 << 16), flips=st.integers(1, 6))
def test_whatever_is_damaged_is_said_and_nothing_is_raised(seed: int, flips: int) -> None:
    """Goal: an answer for every store. Method: bits of headers, pages and payloads turned; no file is changed by it."""
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "s"
        with opened(directory) as store:
            put(store, range(14))
        there = files(directory)
        for _ in range(flips):
            path = there[rng.integers(len(there))]
            flip(path, int(rng.integers(path.stat().st_size)))
        before = {path.name: path.read_bytes() for path in directory.iterdir()}
        found = inventory(directory, NOW_S)
        assert found.records <= 14
        assert found.records == 14 or not all(extent.sound for extent in found.extents)
        assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
        assert found.to_text()


def test_a_file_that_is_no_extent_is_named_and_the_others_are_counted(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        put(store, range(26))
    first, second, third = files(tmp_path / "s")
    first.write_bytes(b"junk" * 2048)
    flip(second, 100)
    found = inventory(tmp_path / "s", NOW_S)
    assert [extent.records for extent in found.extents] == [0, 11, 4]
    text = found.to_text()
    assert f"{first.name}: left alone" in text
    assert f"{second.name}: 0 heads, 1 pages damaged" in text
    assert third.name not in text


def test_it_locks_nobody_out_and_counts_beside_a_writer(tmp_path: Path) -> None:
    """Method: a writer that puts and evicts all the time; every look is an answer, and a new
    writer opens while somebody looks."""
    stop, failures = threading.Event(), []

    def write() -> None:
        try:
            n = 0
            while not stop.is_set():
                with opened(tmp_path / "s", quota_nbytes=128 << 10) as store:
                    for _ in range(20):
                        assert put(store, [n]) == [True]
                        n += 1
        except BaseException as error:
            failures.append(error)
            raise

    with opened(tmp_path / "s", quota_nbytes=128 << 10):
        pass
    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    try:
        most = looks = 0
        while looks < 200 or (not most and looks < 20_000):  # the writer may begin late
            looks += 1
            found = inventory(tmp_path / "s", NOW_S)
            most = max(most, found.records)
            assert found.records * LAYOUT.nbytes <= 256 << 10
    finally:
        stop.set()
        writer.join(60)
    assert not failures, failures[0]
    assert most > 0


def test_the_command_shows_the_stores_below_a_directory_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("kv", "rows"):
        FileStore(tmp_path / "s" / name, quota_nbytes=1 << 20).close()
    with opened(tmp_path / "s" / "rows") as store:
        put(store, range(3))
    assert stores_in(tmp_path / "s") == [tmp_path / "s" / "kv", tmp_path / "s" / "rows"]
    assert main(["inspect", str(tmp_path / "s"), "--json", str(tmp_path / "found.json")]) == 0
    text = capsys.readouterr().out
    assert f"{tmp_path / 's' / 'rows'}: 3 records, {3 * LAYOUT.nbytes:,} bytes, in 1 extents" in text
    assert key_of(0)[:SCOPE_NBYTES].hex() in text
    kv, rows = json.loads((tmp_path / "found.json").read_text())
    assert (kv["records"], rows["records"], rows["nbytes"]) == (0, 3, 3 * LAYOUT.nbytes)
    assert rows["namespaces"][0]["records"] == 3
    assert rows["sizes"][0]["name"] == f"up to {align(LAYOUT.nbytes, 8192) >> 10} KiB"


def test_where_there_is_no_store_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StoreMissingError, match="no store"):
        stores_in(tmp_path)
    assert main(["inspect", str(tmp_path / "nowhere")]) == USAGE
    assert "there is no store" in capsys.readouterr().err
