"""Shared regions among real processes: who may map what, who removes it, and what a killed one leaves."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.errors import (
    InvalidInputError,
    NoSpaceError,
    RegionMismatchError,
    RegionMissingError,
)
from cache_manager.regions import SharedRegion, list_regions, reap_orphans
from cache_manager.regions.directory import DIRECTORY
from cache_manager.regions.header import SCOPE_NBYTES, SCOPE_OFFSET, pack_header
from cache_manager.spec import AuxBlockDataSpec, RecordLayout

NAMESPACE = b"namespace-of-16b"
LAYOUT = RecordLayout(
    (AuxBlockDataSpec("routing", (5, 4), "uint8", 70), AuxBlockDataSpec("weights_version", (), "uint32", 70))
)
Start = Callable[..., Any]


def create(blocks: int = 4) -> SharedRegion:
    return SharedRegion.create(LAYOUT, blocks, purpose="host", namespace=NAMESPACE)


@pytest.fixture
def region() -> Iterator[SharedRegion]:
    with create() as region:
        yield region


@pytest.fixture
def squatted() -> Iterator[tuple[str, Path]]:
    """A name that fits, whose file the test makes itself."""
    name = f"kvroute-{os.geteuid()}-{uuid.uuid4().hex}-host"
    path = DIRECTORY / name
    yield name, path
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)


# ---- one owner, other processes ------------------------------------------------------------------------------------


def test_another_process_reads_what_the_owner_wrote_and_answers(region: SharedRegion, child: Start) -> None:
    """Goal: it is shared. Method: an unrelated process attaches by name, reads a record, writes another."""
    region.rows[1] = np.arange(LAYOUT.nbytes) % 251
    region.valid[1, 1] = [3, 1]
    region.words[1] = 5 << 16
    reader = child(
        """
region = SharedRegion.attach(sys.argv[1], LAYOUT, purpose="host", blocks=4, namespace=NAMESPACE, writable=True)
taken = snapshot(region, 1)
say(taken.generation, taken.valid.sum(), int((taken.payload == np.arange(LAYOUT.nbytes) % 251).all()))
region.rows[2] = 77
region.close()
""",
        region.name,
    )
    assert reader.heard() == ["5", "4", "1"]
    assert reader.finish() == (0, "")
    assert (region.rows[2] == 77).all()
    assert not region.rows[3].any()


def test_an_attaching_process_that_exits_does_not_remove_the_region(region: SharedRegion, child: Start) -> None:
    """Goal: unlike multiprocessing.shared_memory below 3.13. Method: attach, leave without close, attach again."""
    for _ in range(2):
        leaver = child("region = SharedRegion.attach(sys.argv[1], LAYOUT); say('in')", region.name)
        assert leaver.heard() == ["in"]
        assert leaver.finish() == (0, "")
    assert (DIRECTORY / region.name).exists()


def test_a_reading_attacher_cannot_write(region: SharedRegion) -> None:
    with SharedRegion.attach(region.name, LAYOUT) as reader:
        with pytest.raises(ValueError, match="read-only"):
            reader.rows[0] = 1
        with pytest.raises(AssertionError, match="own"):
            reader.renew(NAMESPACE)
        assert not reader.is_owner


def test_the_name_goes_with_the_owner_and_the_memory_with_its_last_user() -> None:
    owner = create()
    owner.rows[0] = 8
    reader = SharedRegion.attach(owner.name, LAYOUT)
    owner.close()
    assert not (DIRECTORY / owner.name).exists()
    assert (reader.rows[0] == 8).all()
    with pytest.raises(RegionMissingError):
        SharedRegion.attach(owner.name, LAYOUT)
    reader.close()


@pytest.mark.parametrize("ending", ["", "raise SystemExit(3)", "1 / 0", "sys.exit('bye')"])
def test_an_owner_that_exits_without_close_removes_the_region(child: Start, ending: str) -> None:
    owner = child(f"r = SharedRegion.create(LAYOUT, 4, purpose='swap', namespace=NAMESPACE); say(r.name)\n{ending}")
    (name,) = owner.heard()
    owner.finish()
    assert not (DIRECTORY / name).exists()


def test_a_forked_child_uses_the_region_but_never_removes_it(child: Start) -> None:
    """Goal: a worker forked by the owner may close or exit. Method: fork twice, once each way; write through both."""
    owner = child("""
region = SharedRegion.create(LAYOUT, 4, purpose="host", namespace=NAMESPACE)
path = "/dev/shm/" + region.name
for ending in ("close", "exit"):
    pid = os.fork()
    if pid == 0:
        region.rows[0] += 1
        say(region.is_owner)
        region.close() if ending == "close" else None
        sys.exit(0)
    os.waitpid(pid, 0)
say(os.path.exists(path), region.rows[0].min(), region.is_owner)
region.close()
say(os.path.exists(path))
""")
    assert owner.heard() == ["False"]
    assert owner.heard() == ["False"]
    assert owner.heard() == ["True", "2", "True"]
    assert owner.heard() == ["False"]
    assert owner.finish() == (0, "")


def test_renew_tells_attached_readers_the_epoch_and_the_namespace(region: SharedRegion) -> None:
    reader = SharedRegion.attach(region.name, LAYOUT, namespace=NAMESPACE)
    assert (reader.epoch, reader.namespace) == (1, NAMESPACE)
    region.renew(b"another--of--16b")
    assert (reader.epoch, reader.namespace) == (2, b"another--of--16b")
    reader.close()
    with pytest.raises(RegionMismatchError) as caught:
        SharedRegion.attach(region.name, LAYOUT, namespace=NAMESPACE)
    assert caught.value.field == "namespace"


# ---- attach: every mismatch ----------------------------------------------------------------------------------------


OTHER = RecordLayout((AuxBlockDataSpec("routing", (5, 4), "uint8", 71),))


@pytest.mark.parametrize(
    ("layout", "asked", "field"),
    [
        (OTHER, {}, "layout fingerprint"),
        (LAYOUT, {"purpose": "swap"}, "purpose"),
        (LAYOUT, {"blocks": 5}, "blocks"),
        (LAYOUT, {"namespace": b"x" * 16}, "namespace"),
    ],
)
def test_a_region_of_another_kind_is_not_mapped(
    region: SharedRegion, layout: RecordLayout, asked: dict[str, Any], field: str
) -> None:
    with pytest.raises(RegionMismatchError) as caught:
        SharedRegion.attach(region.name, layout, **asked)
    assert caught.value.field == field
    assert region.name in str(caught.value)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"layout": b"z" * 16}, "layout fingerprint"),
        ({"blocks": 0}, "blocks"),
        ({"blocks": 1 << 40}, "blocks"),
        ({"blocks": 5}, "size"),
        ({"blocks": 400}, "valid offset"),
        ({"record_nbytes": 64}, "record bytes"),
        ({"specs": 1}, "specs"),
        ({"valid_words": 1}, "valid words"),
        ({"words_offset": 0}, "words offset"),
        ({"valid_offset": 64}, "valid offset"),
        ({"rows_offset": 4096}, "rows offset"),
        ({"nbytes": 8192}, "size"),
        ({"uuid": b"u" * 16}, "uuid"),
        ({"purpose": "junk"}, "purpose"),
    ],
)
def test_a_header_that_is_sound_but_does_not_fit_is_not_mapped(
    region: SharedRegion, change: dict[str, Any], field: str
) -> None:
    """Goal: no offset or size is believed. Method: write a header with a right sum and one wrong number."""
    rewrite(region, 0, pack_header(msgspec.structs.replace(region.header, **change)))
    with pytest.raises(RegionMismatchError) as caught:
        SharedRegion.attach(region.name, LAYOUT)
    assert caught.value.field == field


FIELDS_BY_BYTE = ((0, "magic"), (8, "version"), (12, "header crc"), (SCOPE_OFFSET, "epoch crc"))


@given(bit=st.integers(0, 8 * (SCOPE_OFFSET + SCOPE_NBYTES) - 1))
def test_a_flipped_bit_of_the_header_is_found(bit: int) -> None:
    with create() as region:
        path = DIRECTORY / region.name
        raw = bytearray(path.read_bytes()[: SCOPE_OFFSET + SCOPE_NBYTES])
        raw[bit // 8] ^= 1 << bit % 8
        rewrite(region, 0, bytes(raw))
        with pytest.raises(RegionMismatchError) as caught:
            SharedRegion.attach(region.name, LAYOUT)
        _, field = max((first, field) for first, field in FIELDS_BY_BYTE if first <= bit // 8)
        assert caught.value.field == field


def test_the_header_lies_byte_by_byte_as_documented(region: SharedRegion) -> None:
    """Goal: docs/format.md is true and the format does not change by accident. Method: read at its offsets."""
    raw = (DIRECTORY / region.name).read_bytes()
    number = {at: int.from_bytes(raw[at : at + n], "little") for at, n in ((8, 4), (12, 4), (40, 4), (44, 4))}
    number |= {at: int.from_bytes(raw[at : at + 8], "little") for at in (16, 24, 32, 48, 56, 64, 120, 192)}
    assert (raw[:8], number[8], number[12]) == (b"kvregion", 1, os.geteuid())
    assert (number[16], number[24], number[32]) == (len(raw), 4, LAYOUT.nbytes)
    assert (number[40], number[44]) == (2, 2)
    assert (number[48], number[56], number[64]) == (4096, 4096 + 64, 8192)
    assert raw[72:88] == LAYOUT.fingerprint
    assert raw[88:104].hex() == region.name.split("-")[2]
    assert (number[120], raw[136:144]) == (os.getpid(), b"host\0\0\0\0")
    assert raw[144:188] == bytes(44)
    assert int.from_bytes(raw[188:192], "little") == zlib.crc32(raw[:188])
    assert (number[192], raw[200:216]) == (1, NAMESPACE)
    assert int.from_bytes(raw[216:220], "little") == zlib.crc32(raw[192:216])
    assert raw[220:8192] == bytes(8192 - 220)


def test_a_region_still_being_made_is_not_mapped(region: SharedRegion) -> None:
    rewrite(region, 0, bytes(8))
    with pytest.raises(RegionMismatchError) as caught:
        SharedRegion.attach(region.name, LAYOUT)
    assert caught.value.field == "magic"


@pytest.mark.parametrize("nbytes", [0, 100, 4096, 8192])
def test_a_truncated_region_is_not_mapped(nbytes: int) -> None:
    """Goal: no SIGBUS. Method: another process of this user cut the file short before attach."""
    owner = create()
    os.truncate(DIRECTORY / owner.name, nbytes)
    with pytest.raises(RegionMismatchError) as caught:
        SharedRegion.attach(owner.name, LAYOUT)
    assert caught.value.field in {"size", "file size"}
    owner.close()


def test_an_extended_region_is_not_mapped(region: SharedRegion) -> None:
    os.truncate(DIRECTORY / region.name, region.nbytes + 4096)
    with pytest.raises(RegionMismatchError) as caught:
        SharedRegion.attach(region.name, LAYOUT)
    assert (caught.value.field, caught.value.wanted) == ("file size", region.nbytes)


def test_a_region_that_others_may_open_is_not_mapped(region: SharedRegion) -> None:
    os.chmod(DIRECTORY / region.name, 0o640)
    with pytest.raises(RegionMismatchError) as caught:
        SharedRegion.attach(region.name, LAYOUT)
    assert caught.value.field == "mode"


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file away takes root")
def test_a_region_of_another_user_is_not_mapped(region: SharedRegion) -> None:
    os.chown(DIRECTORY / region.name, 12345, 12345)
    with pytest.raises(RegionMismatchError) as caught:
        SharedRegion.attach(region.name, LAYOUT)
    assert (caught.value.field, caught.value.got) == ("owner uid", 12345)
    os.chown(DIRECTORY / region.name, os.geteuid(), -1)


@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("kind", ["link", "directory", "pipe", "socket", "foreign", "empty"])
def test_what_is_not_a_region_is_neither_mapped_nor_followed(
    region: SharedRegion, squatted: tuple[str, Path], kind: str, writable: bool
) -> None:
    """Goal: a squatter gains nothing. Method: each kind of file under a name that fits; a link to a good region."""
    name, path = squatted
    if kind == "link":
        path.symlink_to(DIRECTORY / region.name)
    elif kind == "directory":
        path.mkdir(0o700)
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    else:
        path.write_bytes(b"#!/bin/sh\n" * 1000 if kind == "foreign" else b"")
        path.chmod(0o600)
    with pytest.raises(RegionMismatchError) as caught:
        SharedRegion.attach(name, LAYOUT, writable=writable)
    assert caught.value.field == {"foreign": "magic", "empty": "size"}.get(kind, "file type")


def test_a_region_that_is_not_there_is_missing(squatted: tuple[str, Path]) -> None:
    with pytest.raises(RegionMissingError):
        SharedRegion.attach(squatted[0], LAYOUT)


@pytest.mark.parametrize("name", ["", "x", "../etc/passwd", "kvroute-0-abc-host", f"kvroute-0-{'a' * 32}-host/../x", 3])
def test_what_cannot_be_a_name_is_refused(name: Any) -> None:
    with pytest.raises(InvalidInputError) as caught:
        SharedRegion.attach(name, LAYOUT)
    assert caught.value.field == "region name"


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({"purpose": "scratch"}, "region purpose"),
        ({"namespace": b"short"}, "region namespace"),
        ({"namespace": "a" * 16}, "region namespace"),
        ({"epoch": -1}, "region epoch"),
        ({"epoch": 1 << 64}, "region epoch"),
    ],
)
def test_bad_arguments_create_nothing(bad: dict[str, Any], field: str) -> None:
    before = names()
    with pytest.raises(InvalidInputError) as caught:
        SharedRegion.create(LAYOUT, 4, **{"purpose": "host", "namespace": NAMESPACE, **bad})
    assert caught.value.field == field
    assert names() <= before


# ---- killed owners -------------------------------------------------------------------------------------------------

OWNER = "region = SharedRegion.create(LAYOUT, 4, purpose='host', namespace=NAMESPACE); say(region.name); wait()"
ATTACHER = "region = SharedRegion.attach(sys.argv[1], LAYOUT); say('in'); wait()"


def test_a_killed_owner_leaves_a_region_that_the_next_create_removes(child: Start) -> None:
    owner = child(OWNER)
    (name,) = owner.heard()
    owner.kill()
    found = {info.name: info for info in list_regions()}[name]
    assert (found.in_use, found.owner_alive, found.purpose) == (False, False, "host")
    with create() as region:
        assert not (DIRECTORY / name).exists()
        assert (DIRECTORY / region.name).exists()
        assert reap_orphans() == []


def test_a_killed_process_group_leaves_a_region_that_the_next_create_removes(child: Start) -> None:
    """Goal: a container stop leaves nothing for ever. Method: owner, forked worker and attacher die at one signal."""
    family = child(f"""
{OWNER.removesuffix("wait()")}
if os.fork() == 0:
    time.sleep(60)
import subprocess
subprocess.Popen([sys.executable, "-c", "import sys, time; from cache_manager.regions.directory import *; "
    "fd = os.open(region_path(sys.argv[1]), os.O_RDONLY); print(lock_shared(fd), flush=True); time.sleep(60)",
    region.name])
wait()
""")
    (name,) = family.heard()
    assert family.heard() == ["True"]
    with create():
        assert (DIRECTORY / name).exists()
    family.kill_group()
    wait_for_no_user(name)
    create().close()
    assert not (DIRECTORY / name).exists()


def test_a_region_is_not_reaped_while_anyone_has_it_mapped(child: Start) -> None:
    """Goal: a reader survives its owner. Method: kill the owner, create, read on; kill the reader, create."""
    owner = child(OWNER)
    (name,) = owner.heard()
    with create(), SharedRegion.attach(name, LAYOUT) as reader:
        attacher = child(ATTACHER, name)
        assert attacher.heard() == ["in"]
        owner.kill()
        assert name not in reap_orphans()
        info = {info.name: info for info in list_regions()}[name]
        assert (info.in_use, info.owner_alive) == (True, False)
        reader.close()
        assert name not in reap_orphans()
    attacher.kill()
    assert name in reap_orphans()
    assert not (DIRECTORY / name).exists()


def test_a_file_of_a_creator_killed_halfway_is_removed(squatted: tuple[str, Path]) -> None:
    name, path = squatted
    path.write_bytes(bytes(5000))
    found = {info.name: info for info in list_regions()}[name]
    assert (found.header, found.in_use) == (None, False)
    assert name in reap_orphans()


def test_the_reaper_leaves_links_and_foreign_names_alone(squatted: tuple[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("kept")
    squatted[1].symlink_to(target)
    foreign = DIRECTORY / f"kvroute-{os.geteuid()}-{uuid.uuid4().hex}-other"
    foreign.write_text("kept")
    try:
        reaped = reap_orphans()
        assert squatted[0] not in reaped
        assert foreign.name not in reaped
        assert target.read_text() == foreign.read_text() == "kept"
    finally:
        foreign.unlink()


def test_creators_and_reapers_at_once_do_not_harm_each_other(child: Start) -> None:
    """Goal: creation needs no luck. Method: three processes create, check, attach and close while each reaps."""
    workers = [
        child("""
for i in range(60):
    region = SharedRegion.create(LAYOUT, 2, purpose="swap", namespace=NAMESPACE)
    region.rows[1] = i
    assert not set(reap_orphans()) & {region.name}
    with SharedRegion.attach(region.name, LAYOUT) as reader:
        assert (reader.rows[1] == i).all()
    list_regions()
    region.close()
say("done")
""")
        for _ in range(3)
    ]
    for worker in workers:
        assert worker.heard() == ["done"]
        assert worker.finish() == (0, "")


# ---- no room -------------------------------------------------------------------------------------------------------


def test_more_than_dev_shm_has_is_refused_with_the_numbers_and_leaves_nothing() -> None:
    before = names()
    free = shutil.disk_usage(DIRECTORY).free
    blocks = free // LAYOUT.nbytes + 1_000_000
    with pytest.raises(NoSpaceError, match="--shm-size=") as caught:
        create(blocks)
    assert caught.value.where == str(DIRECTORY)
    assert caught.value.wanted_nbytes > blocks * LAYOUT.nbytes > caught.value.free_nbytes
    assert names() <= before


def test_a_file_size_limit_is_an_error_that_leaves_nothing(child: Start) -> None:
    """Goal: whatever the allocation says, nothing is left. Method: a resource limit makes it fail after the open."""
    limited = child("""
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    SharedRegion.create(LAYOUT, 4, purpose="host", namespace=NAMESPACE)
except RegionError as error:
    say(str(error).split()[1].rstrip(":"), "File too large" in str(error))
""")
    name, clear = limited.heard()
    assert clear == "True"
    assert not (DIRECTORY / name).exists()


SMALL_TMPFS = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$0" "$@"')
UNSHARE_AS_USER = ("unshare", "-r", *SMALL_TMPFS[1:])


def private_dev_shm() -> tuple[str, ...]:
    for command in (SMALL_TMPFS, UNSHARE_AS_USER):
        try:
            if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
                return command
        except FileNotFoundError:
            break
    pytest.skip("this system permits no private mounts")


def test_a_full_dev_shm_is_an_error_and_never_a_sigbus(child: Start) -> None:
    """Goal: docker's 64 MB. Method: an own /dev/shm of 8 MiB: too big at once, then until full, then after a close."""
    inside = child(
        """
def create(mib):
    return SharedRegion.create(LAYOUT, (mib << 20) // LAYOUT.nbytes, purpose="host", namespace=NAMESPACE)
try:
    create(100)
except NoSpaceError as error:
    remedy = f"--shm-size={-(-error.wanted_nbytes // (1 << 20))}m"
    say(error.where, error.wanted_nbytes >= (99 << 20), error.free_nbytes, remedy in str(error))
say(len(os.listdir("/dev/shm")))
first, second = create(3), create(3)
try:
    create(3)
except NoSpaceError as error:
    say(error.free_nbytes < (3 << 20), len(os.listdir("/dev/shm")))
first.close()
third = create(3)
third.rows[:] = 1
say(int(second.rows.sum()), int(third.rows.sum()) == third.rows.size)
""",
        before=private_dev_shm(),
    )
    assert inside.heard() == [str(DIRECTORY), "True", str(8 << 20), "True"]
    assert inside.heard() == ["0"]
    assert inside.heard() == ["True", "2"]
    assert inside.heard() == ["0", "True"]
    assert inside.finish() == (0, "")


def test_two_creators_race_for_the_last_room(child: Start) -> None:
    """Goal: the loser gets an error, not a signal. Method: two processes each want 5 of 8 MiB, over and over."""
    inside = child(
        """
def create():
    return SharedRegion.create(LAYOUT, (5 << 20) // LAYOUT.nbytes, purpose="host", namespace=NAMESPACE)
other = os.fork()
made = refused = 0
for _ in range(150):
    try:
        region = create()
        region.rows[:] = 1
        made += 1
        region.close()
    except NoSpaceError as error:
        assert error.where == "/dev/shm", error
        refused += 1
if other:
    status = os.waitpid(other, 0)[1]
    create().close()  # whoever won before, the room is there again
    say(status, made + refused, len(os.listdir("/dev/shm")))
""",
        before=private_dev_shm(),
    )
    assert inside.heard() == ["0", "150", "0"]
    assert inside.finish() == (0, "")


# ---- a reader beside a writer --------------------------------------------------------------------------------------

WRITER = """
region = SharedRegion.attach(sys.argv[1], LAYOUT, writable=True)
order, end, generation = sys.argv[2], time.monotonic() + float(sys.argv[3]), 0
full = np.array([(1 << 64) - 1, (1 << 6) - 1], np.uint64)
say("writing")
while time.monotonic() < end:
    generation += 1
    for block in range(region.blocks):
        if order == "right":
            region.valid[block] = 0
            region.words[block] = generation << 16
        else:
            region.words[block] = generation << 16
            time.sleep(0.002)
            region.valid[block] = 0
        region.rows[block] = (generation * 7 + block) % 251
        region.valid[block] = full
say(generation)
"""


def test_a_reader_never_takes_torn_or_foreign_rows(region: SharedRegion, child: Start) -> None:
    """Goal: ports.Region's protocol holds between processes. Method: a row's bytes say its generation and block."""
    writer = child(WRITER, region.name, "right", 1.5)
    assert writer.heard() == ["writing"]
    whole, wrong = count_rows(region, writer)
    assert wrong == 0
    assert whole > 10
    assert int(writer.heard()[0]) > 10


def test_a_writer_that_changes_the_word_before_it_clears_the_bits_is_caught(region: SharedRegion, child: Start) -> None:
    """Goal: the test above can fail. Method: plant that fault in the writer."""
    writer = child(WRITER, region.name, "wrong", 4)
    assert writer.heard() == ["writing"]
    assert count_rows(region, writer)[1] > 0


def count_rows(region: SharedRegion, writer: Any) -> tuple[int, int]:
    """Snapshots with valid rows, and how many of them were wrong, taken in another process until the writer ends."""
    reader = subprocess.run(
        [*writer.process.args[:2], READER, region.name], capture_output=True, text=True, check=True, timeout=30
    )
    whole, wrong = map(int, reader.stdout.split())
    return whole, wrong


READER = """
import sys, time
from cache_manager.regions import SharedRegion, snapshot
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
specs = AuxBlockDataSpec("routing", (5, 4), "uint8", 70), AuxBlockDataSpec("weights_version", (), "uint32", 70)
layout = RecordLayout(specs)
region = SharedRegion.attach(sys.argv[1], layout)
whole = wrong = 0
changed = time.monotonic()
last = 0
while time.monotonic() - changed < 0.3:
    word = int(region.words[0])
    if word != last:
        last, changed = word, time.monotonic()
    for block in range(region.blocks):
        taken = snapshot(region, block)
        if taken is not None and taken.valid.any():
            whole += 1
            wrong += bool((taken.payload != (taken.generation * 7 + block) % 251).any())
print(whole, wrong)
"""


# ---- what the tests above use --------------------------------------------------------------------------------------


def names() -> set[str]:
    return {info.name for info in list_regions()}


def rewrite(region: SharedRegion, at: int, raw: bytes) -> None:
    fd = os.open(DIRECTORY / region.name, os.O_RDWR)
    try:
        assert os.pwrite(fd, raw, at) == len(raw)
    finally:
        os.close(fd)


def wait_for_no_user(name: str) -> None:
    """Killed grandchildren drop their locks a moment after the signal."""
    for _ in range(500):
        if not next((info.in_use for info in list_regions() if info.name == name), False):
            return
        time.sleep(0.01)
    raise AssertionError(f"{name} is still in use")
