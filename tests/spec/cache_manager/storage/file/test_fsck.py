"""``kvroute fsck``: it reports exactly the records that a reader finds, and reports damage."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from budget import examples
from faulty_disk import FaultyDisk
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from stores import PER_EXTENT, Clock, files, flip, opened, payload_in
from waiting import GIVE_UP_S

from cache_manager.errors import StoreFormatError, StoreLockedError, StoreMissingError
from cache_manager.keys import SCOPE_NBYTES, BlockKey
from cache_manager.record import RecordHeader
from cache_manager.storage.file import fsck
from cache_manager.storage.file.directory import LockedDirectory
from cache_manager.testing.records import LAYOUT, get, header_of, key_of, payload_of, put
from kvroute.cli import FAILED, USAGE, main

STEPS = st.one_of(
    st.tuples(st.sampled_from(["put", "delete"]), st.integers(0, 3), st.integers(0, 30)),
    st.tuples(st.just("wait"), st.integers(0, 100_000), st.just(0)),
)


def in_scope(scope: int, n: int) -> RecordHeader:
    """A record of another namespace."""
    return replace(header_of(n), key=BlockKey(bytes([scope]) * SCOPE_NBYTES + key_of(n)[SCOPE_NBYTES:]))


@examples(25)
@given(st.lists(STEPS, max_size=40))
def test_namespaces_and_ages_are_those_of_what_was_put(steps: list[tuple[str, int, int]]) -> None:
    """Method: any puts, deletions and waits, with room for all; a dict from key to scope says what has to be there."""
    clock, held = Clock(), dict[bytes, tuple[int, float]]()
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "s"
        with opened(directory, clock=clock) as store:
            for what, a, b in steps:
                if what == "wait":
                    clock.now_s += a
                elif what == "put":
                    assert store.backend.put([in_scope(a, b)], [payload_of(b)])
                    held.setdefault(in_scope(a, b).key, (a, clock.now_s))
                else:
                    store.backend.delete([in_scope(a, b).key])
                    held.pop(in_scope(a, b).key, None)
            live = fsck(directory, now_s=clock.now_s)
        for found in (live, fsck(directory, now_s=clock.now_s)):
            assert found.sound
            assert sum(extent.records for extent in found.extents) == len(held)
            assert {share.namespace for share in found.namespaces} == {bytes([a] * 8).hex() for a, _ in held.values()}
            for share in found.namespaces:
                theirs = [when for a, when in held.values() if bytes([a] * 8).hex() == share.namespace]
                assert (share.records, share.nbytes) == (len(theirs), len(theirs) * LAYOUT.nbytes)
                ages = [clock.now_s - when for when in (min(theirs), max(theirs))]
                assert [share.oldest_s, share.newest_s] == pytest.approx(ages, abs=0.01)


@examples(20)
@given(seed=st.integers(0, 1 << 16), flips=st.integers(1, 6))
def test_every_damage_is_reported_and_nothing_is_raised(seed: int, flips: int) -> None:
    """Goal: an answer for every store. Method: bits of pages, heads and payloads turned; no file is changed by it."""
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "s"
        with opened(directory) as store:
            put(store, range(14))
        for _ in range(flips):
            path = files(directory)[rng.integers(len(files(directory)))]
            flip(path, int(rng.integers(path.stat().st_size)))
        before = {path.name: path.read_bytes() for path in directory.iterdir()}
        found = fsck(directory, payloads=True)
        there = sum(extent.records - extent.corrupt for extent in found.extents)
        assert there == 14 or not found.sound
        assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
        with opened(directory) as store:
            assert sum(answer == payload_of(n) for n, answer in enumerate(get(store, range(14)))) == there


def test_heads_that_the_disk_does_not_give_are_not_sound(tmp_path: Path) -> None:
    """A bug that was found: unreadable slots were counted as free. Method: reads fail of a byte of the heads."""
    disk = FaultyDisk()
    disk.bad = range(4096, 4097)
    with opened(tmp_path) as store:
        assert all(put(store, range(5)))
    (extent,) = fsck(tmp_path, disk=disk).extents
    assert (extent.records, extent.sound) == (0, False)
    assert "Input/output error" in extent.refused
    assert fsck(tmp_path).sound


def test_where_there_is_no_store_nothing_is_checked_and_nothing_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    for name, error in (("empty", StoreMissingError), ("nowhere", StoreMissingError), ("home", StoreFormatError)):
        with pytest.raises(error):
            fsck(tmp_path / name)
        assert main(["fsck", str(tmp_path / name)]) == USAGE
        assert str(tmp_path / name) in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["empty", "home", "thesis.tex"]


def test_a_store_that_is_refused_or_forgotten_leaves_no_descriptor(tmp_path: Path) -> None:
    """Goal: a process may try again for as long as it likes. Method: a folder that is no store, one with a writer, and
    a writer that nobody closes."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with opened(tmp_path / "rows"):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with pytest.raises(StoreFormatError):
                fsck(tmp_path / "home")
            with pytest.raises(StoreLockedError):
                LockedDirectory(tmp_path / "rows", 0o600)
            LockedDirectory(tmp_path / "other", 0o600)
            gc.collect()
        assert len(os.listdir("/proc/self/fd")) == before


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "kvroute.cli", "fsck", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=GIVE_UP_S, check=False)


def test_the_command_prints_a_report_and_returns_a_status(tmp_path: Path) -> None:
    """A sound store; then a payload, a page and a head of it damaged, and a file of another kind: reported as far as
    requested, and nothing is changed."""
    directory, out = tmp_path / "rows", tmp_path / "report.json"
    with opened(directory) as store:
        assert all(put(store, range(26)))
    first = run(str(directory))
    assert first.returncode == 0, first.stderr
    assert first.stdout.endswith(f"{directory}: sound (payloads were not read: --payloads)\n")
    assert f"{key_of(0)[:SCOPE_NBYTES].hex():19}{26:>15}{26 * LAYOUT.nbytes:>15,}" in first.stdout
    flip(*payload_in(directory, key_of(2), 1000))
    assert run(str(directory)).returncode == 0
    flip(files(directory)[1], 0)
    raw = files(directory)[2].read_bytes()
    flip(files(directory)[2], raw.index(key_of(24)))
    (directory / "extent-00000009.kvr").write_bytes(b"junk" * 2048)
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    second = run(str(directory), "--payloads", "--json", str(out))
    assert second.returncode == FAILED
    assert "extent-00000009.kvr" + f"{0:>15}" * 5 + "  left alone: " in second.stdout
    report = json.loads(out.read_text())
    found = [(each["corrupt"], each["damaged_heads"], bool(each["refused"])) for each in report["extents"]]
    assert (report["sound"], found) == (False, [(0, 0, True), (0, 0, True), (1, 0, False), (0, 1, False)])
    assert before == {path.name: path.read_bytes() for path in directory.iterdir()}
    with opened(directory) as store:
        served = {n for n, answer in enumerate(get(store, range(26))) if answer == payload_of(n)}
    assert served == set(range(PER_EXTENT)) - {2} | {25}
