"""What attach refuses to map, field by field."""

from __future__ import annotations

import json
import os
import socket
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from region_children import LAYOUT, NAMESPACE, create, rewrite

from cache_manager.errors import InvalidInputError, RegionMismatchError, RegionMissingError
from cache_manager.regions import RegionView, SharedRegion
from cache_manager.regions.directory import DIRECTORY, lock_shared
from cache_manager.regions.header import CRC_OFFSET, SPECS_OFFSET


def refused(name: Any, *, writable: bool = False) -> RegionMismatchError:
    with pytest.raises(RegionMismatchError) as caught:
        SharedRegion.attach(name, writable=writable)
    assert name in str(caught.value)
    return caught.value


def test_a_region_of_another_namespace_or_mode_is_not_mapped(region: SharedRegion) -> None:
    with pytest.raises(RegionMismatchError) as caught:
        RegionView(region.name, namespace=b"x" * 16)
    assert (caught.value.field, caught.value.got) == ("namespace", NAMESPACE.hex())
    os.chmod(DIRECTORY / region.name, 0o640)
    assert "-rw-r-----" in str(refused(region.name))


@pytest.mark.parametrize(
    ("at", "raw", "field"),
    [
        (8, (1).to_bytes(4, "little"), "version"),
        (12, (3).to_bytes(4, "little"), "specs"),
        (12, (1 << 31).to_bytes(4, "little"), "specs"),
        (16, (0).to_bytes(8, "little"), "blocks"),
        (16, (1 << 40).to_bytes(8, "little"), "blocks"),
        (16, (400).to_bytes(8, "little"), "size"),
        (24, (8192).to_bytes(8, "little"), "size"),
        (32, b"z" * 16, "specs"),
        (48, b"u" * 16, "uuid"),
        (SPECS_OFFSET, b"null", "specs"),
        (SPECS_OFFSET, b"[17]", "specs"),
        (SPECS_OFFSET, b"\xff\xff", "specs"),
    ],
)
def test_a_header_that_is_sound_but_does_not_fit_is_not_mapped(
    region: SharedRegion, at: int, raw: bytes, field: str
) -> None:
    """Goal: no size and no spec is trusted unchecked. Method: write a header with a right sum and one wrong field."""
    header = bytearray((DIRECTORY / region.name).read_bytes()[:4096])
    header[at : at + len(raw)] = raw
    header[CRC_OFFSET : CRC_OFFSET + 4] = zlib.crc32(header[:CRC_OFFSET]).to_bytes(4, "little")
    rewrite(region, 0, bytes(header))
    assert refused(region.name).field == field


@given(bit=st.integers(0, 8 * (CRC_OFFSET + 4) - 1))
def test_a_flipped_bit_of_the_header_is_found(bit: int) -> None:
    with create() as region:
        raw = bytearray((DIRECTORY / region.name).read_bytes()[: CRC_OFFSET + 4])
        raw[bit // 8] ^= 1 << bit % 8
        rewrite(region, 0, bytes(raw))
        found = refused(region.name)
        starts = ((0, "magic"), (8, "version"), (12, "header crc"))
        assert found.field == max((first, field) for first, field in starts if first <= bit // 8)[1]


def test_the_header_lies_byte_by_byte_as_documented(region: SharedRegion) -> None:
    """Goal: docs/format.md is true and the format does not change by accident. Method: read at its offsets."""
    raw = (DIRECTORY / region.name).read_bytes()
    specs = json.dumps([s.to_json() for s in LAYOUT.specs], sort_keys=True, separators=(",", ":")).encode()
    number = {at: int.from_bytes(raw[at : at + n], "little") for at, n in ((8, 4), (12, 4), (16, 8), (24, 8))}
    assert (raw[:8], number[8], number[12]) == (b"kvregion", 2, len(specs))
    assert (number[16], number[24]) == (4, len(raw))
    assert raw[32:48] == LAYOUT.fingerprint
    assert raw[48:64].hex() == region.name.split("-")[2]
    assert raw[64:124] == bytes(60)
    assert int.from_bytes(raw[124:128], "little") == zlib.crc32(raw[:124])
    assert raw[128:144] == NAMESPACE
    assert int.from_bytes(raw[144:148], "little") == zlib.crc32(NAMESPACE)
    assert raw[148:192] == bytes(44)
    assert raw[192 : 192 + len(specs)] == specs
    assert not any(raw[192 + len(specs) :])
    assert region.words.ctypes.data - region.rows.ctypes.data == 4096 - 8192
    assert region.valid.ctypes.data - region.words.ctypes.data == 64


def test_a_region_that_was_removed_before_the_lock_is_missing(region: SharedRegion) -> None:
    """Goal: attach never keeps a file whose name a reaper has removed. Method: remove it between open and lock."""
    fd = os.open(DIRECTORY / region.name, os.O_RDONLY)
    try:
        assert lock_shared(fd)
        os.unlink(DIRECTORY / region.name)
        assert not lock_shared(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("nbytes", [0, 100, 4096, 8192, 1 << 20])
def test_a_region_that_was_cut_or_grew_is_not_mapped(nbytes: int) -> None:
    """Goal: no SIGBUS. Method: another process of this user changed the file's size before attach."""
    owner = create()
    os.truncate(DIRECTORY / owner.name, nbytes)
    assert refused(owner.name).field in {"size", "file size"}
    owner.close()


@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("kind", ["link", "directory", "pipe", "socket", "foreign", "empty"])
def test_a_file_that_is_not_a_region_is_neither_mapped_nor_followed(
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
    assert refused(name, writable=writable).field == {"foreign": "magic", "empty": "size"}.get(kind, "file")
    path.rmdir() if path.is_dir() else path.unlink()
    with pytest.raises(RegionMissingError):
        SharedRegion.attach(name)


@pytest.mark.parametrize("name", ["", "x", "../etc/passwd", "kvroute-0-abc-host", f"kvroute-0-{'a' * 32}-host/../x", 3])
def test_an_invalid_name_is_refused(name: Any) -> None:
    with pytest.raises(InvalidInputError) as caught:
        SharedRegion.attach(name)
    assert caught.value.field == "region name"
