"""Specs, layouts, namespaces, keys and record headers: what they promise, by property; what they refuse, by example."""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.errors import InvalidInputError, RecordError, RowError, SpecError
from cache_manager.keys import KEY_NBYTES, BlockKey, KeyChain, Namespace, is_key
from cache_manager.record import RecordHeader, check_record, checksum, pack_header, unpack_header
from cache_manager.spec import DTYPES, AuxBlockDataSpec, RecordLayout

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
TOKENS = st.sampled_from([1, 2, 16, 63, 64, 65])
SPECS = st.builds(
    AuxBlockDataSpec,
    name=st.sampled_from(["routing", "logprob", "indexer_topk"]),
    row_shape=st.lists(st.integers(1, 5), max_size=3).map(tuple),
    dtype=st.sampled_from(DTYPES),
    block_tokens=TOKENS,
    attrs=st.dictionaries(st.text(max_size=3), JSON, max_size=2),
)
NAMESPACES = st.builds(
    Namespace,
    model=st.text(max_size=4),
    weights_version=st.integers(0, 3),
    salt=st.text(max_size=4),
    rank=st.integers(0, 2),
    world=st.integers(3, 4),
)
LAYOUT = RecordLayout((AuxBlockDataSpec("routing", (2,), "uint8", 4),))


@examples(50)
@given(SPECS)
def test_a_spec_survives_json(spec) -> None:
    again = AuxBlockDataSpec.from_json(spec.to_json())
    assert again == spec
    assert hash(again) == hash(spec)
    assert again.fingerprint == spec.fingerprint


@examples(50)
@given(SPECS, SPECS)
def test_fingerprints_are_equal_exactly_for_equal_specs(a, b) -> None:
    assert (a == b) == (a.fingerprint == b.fingerprint)


@examples(50)
@given(st.lists(SPECS, min_size=1, max_size=3, unique_by=lambda s: s.name), TOKENS)
def test_a_layout_packs_specs_on_cache_lines_without_overlap(specs, tokens) -> None:
    specs = [replace(spec, block_tokens=tokens) for spec in specs]
    layout = RecordLayout(tuple(specs))
    end = 0
    for spec, offset in zip(layout.specs, layout.offsets, strict=True):
        assert offset % 64 == 0
        assert end <= offset < end + 64
        end = offset + spec.block_nbytes
    assert end <= layout.nbytes < end + 64
    assert layout.fingerprint != RecordLayout((*specs[1:], specs[0])).fingerprint or len(specs) == 1


@given(NAMESPACES, NAMESPACES, st.lists(st.integers(0, 3), max_size=9), st.lists(st.integers(0, 3), max_size=9))
def test_keys_are_equal_exactly_for_equal_prefixes_in_equal_namespaces(a, b, left, right) -> None:
    keys_a, keys_b = KeyChain(a, LAYOUT).keys(left), KeyChain(b, LAYOUT).keys(right)
    for i, x in enumerate(keys_a):
        for j, y in enumerate(keys_b):
            same = a == b and left[: 4 * i + 4] == right[: 4 * j + 4]
            assert (x == y) == same
        assert KeyChain(b, LAYOUT).owns(x) == (a == b)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=4, max_size=12))
def test_keys_do_not_depend_on_the_integer_type(tokens) -> None:
    chain = KeyChain(Namespace("m", 1), LAYOUT)
    expected = chain.keys(tokens)
    for dtype in (np.int32, np.int64, np.uint32, np.uint64, ">i8"):
        assert chain.keys(np.array(tokens, dtype=dtype)) == expected
    assert chain.keys([np.int64(t) for t in tokens]) == expected


def test_no_salt_is_taken_for_the_blocks_behind_it() -> None:
    """Goal: a hostile salt reaches no other tenant. Method: a salt made of the very bytes that the encoding has behind
    an absent salt."""

    def part(tag: bytes, value: bytes) -> bytes:
        return bytes([len(tag)]) + tag + len(value).to_bytes(8, "little") + value

    plain, parent = KeyChain(Namespace("m", 1), LAYOUT), KeyChain(Namespace("m", 1), LAYOUT).key(None, [1, 2, 3, 4])
    salt = part(b"parent", parent) + part(b"tokens", np.array([5, 6, 7, 8], "<i8").tobytes())
    assert plain.salted(salt).key(None, [5, 6, 7, 8]) != plain.key(parent, [5, 6, 7, 8])
    assert plain.salted(b"") is plain
    with pytest.raises(InvalidInputError, match="salt: wanted bytes, got 'x'"):
        plain.salted("x")  # type: ignore[arg-type]


SOME = st.lists(st.integers(0, 3), max_size=9)


@given(st.binary(max_size=2), st.binary(max_size=2), SOME, SOME)
def test_salted_keys_are_equal_exactly_for_equal_prefixes_under_equal_salts(a, b, left, right) -> None:
    chain = KeyChain(Namespace("m", 1), LAYOUT)
    for i, x in enumerate(chain.salted(a).keys(left)):
        assert chain.owns(x)
        for j, y in enumerate(chain.salted(b).keys(right)):
            assert (x == y) == (a == b and left[: 4 * i + 4] == right[: 4 * j + 4])


def test_no_two_inputs_share_a_byte_string() -> None:
    """Goal: concatenation bugs (LoRA name ``a`` + salt ``b`` == ``ab``). Method: move a character across fields."""
    namespaces = [Namespace("ab", 1, "c"), Namespace("a", 1, "bc"), Namespace("abc", 1, ""), Namespace("", 1, "abc")]
    assert len({n.fingerprint for n in namespaces}) == len(namespaces)
    chain = KeyChain(namespaces[0], LAYOUT)
    parent = chain.key(None, [1, 2, 3, 4])
    keys = {
        chain.key(parent, [5]),
        chain.key(None, [5]),
        chain.key(parent, [5, 0]),
        chain.key(parent, [5, 0, 0]),
    }
    assert len(keys) == 4


HEADERS = st.builds(
    RecordHeader,
    key=st.binary(min_size=KEY_NBYTES, max_size=KEY_NBYTES).map(BlockKey),
    fingerprint=st.binary(min_size=16, max_size=16),
    generation=st.integers(0, 2**64 - 1),
    origin=st.integers(0, 2**64 - 1),
    valid=st.integers(0, 20).flatmap(lambda n: st.binary(min_size=8 * n, max_size=8 * n)),
    payload_nbytes=st.integers(0, 2**40),
    payload_xxh3=st.integers(0, 2**64 - 1),
)


@given(HEADERS, st.binary(max_size=70))
def test_a_header_survives_packing(header, tail) -> None:
    packed = pack_header(header)
    assert len(packed) == header.nbytes
    assert len(packed) % 64 == 0
    assert unpack_header(packed + tail) == header


def test_the_bytes_of_a_header_are_pinned() -> None:
    """Goal: the format changes with its version only. Method: one header, written out field by field."""
    header = RecordHeader(BlockKey(bytes(range(32))), b"f" * 16, 3, 0x0807060504030201, b"\x05" + bytes(7), 192, 9)
    fixed = b"KVRR" + b"\2\0" + b"\x80\0" + b"\xc0" + bytes(7) + b"f" * 16 + bytes(range(32))
    fixed += b"\3" + bytes(7) + bytes(range(1, 9)) + b"\x09" + bytes(7) + b"\2\0\0\0" + b"\x08\0\0\0"
    body = (fixed + b"\x05" + bytes(7)).ljust(124, b"\0")
    assert pack_header(header) == body + zlib.crc32(body).to_bytes(4, "little")


@given(HEADERS, st.data())
def test_a_flipped_bit_in_a_header_is_an_error(header, data) -> None:
    packed = bytearray(pack_header(header))
    bit = data.draw(st.integers(0, len(packed) * 8 - 1))
    packed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RecordError):
        unpack_header(packed)


@given(HEADERS, st.data())
def test_a_cut_header_is_an_error(header, data) -> None:
    packed = pack_header(header)
    with pytest.raises(RecordError):
        unpack_header(packed[: data.draw(st.integers(0, len(packed) - 1))])


def test_a_record_is_checked_whole() -> None:
    key, payload = BlockKey(b"k" * 32), b"rows of a block"
    header = RecordHeader(key, b"f" * 16, 1, 2, b"\xff" * 8, len(payload), checksum(payload))
    check_record(header, key, b"f" * 16, payload)
    for arguments, field in (
        ((BlockKey(b"K" * 32), b"f" * 16, payload), "key"),
        ((key, b"F" * 16, payload), "fingerprint"),
        ((key, b"f" * 16, payload[:-1]), "payload size"),
        ((key, b"f" * 16, payload[:-1] + b"!"), "payload checksum"),
    ):
        with pytest.raises(RecordError) as caught:
            check_record(header, *arguments)
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"name": "Bad Name"}, "spec.name"),
        ({"row_shape": (2, 0)}, "routing.row_shape"),
        ({"row_shape": "23"}, "routing.row_shape"),
        ({"dtype": "bfloat16"}, "routing.dtype"),
        ({"dtype": ">u2"}, "routing.dtype"),
        ({"block_tokens": 0}, "routing.block_tokens"),
        ({"block_tokens": True}, "routing.block_tokens"),
        ({"row_shape": (True,)}, "routing.row_shape"),
        ({"attrs": None}, "routing.attrs"),
        ({"block_tokens": 64.0}, "routing.block_tokens"),
        ({"attrs": {"x": object()}}, "routing.attrs.x"),
        ({"attrs": {"x": float("nan")}}, "routing.attrs.x"),
        ({"row_shape": (2**20, 2**10), "block_tokens": 64}, "routing.block_nbytes"),
    ],
)
def test_a_spec_that_cannot_be_names_the_field(arguments, field) -> None:
    with pytest.raises(SpecError) as caught:
        AuxBlockDataSpec(**{"name": "routing", "row_shape": (2,), "dtype": "uint8", "block_tokens": 4, **arguments})
    assert caught.value.field == field
    assert f"{field}: wanted " in str(caught.value)
    assert ", got " in str(caught.value)


def test_layouts_and_namespaces_that_cannot_be() -> None:
    routing = AuxBlockDataSpec("routing", (2,), "uint8", 4)
    wide = tuple(AuxBlockDataSpec(f"s{i}", (), "bool", 65_536) for i in range(8))
    for specs in (
        (),
        ("routing",),
        "routing",
        routing,
        wide,
        (routing, routing),
        (routing, AuxBlockDataSpec("logprob", (), "float32", 8)),
    ):
        with pytest.raises(SpecError, match="specs: wanted"):
            RecordLayout(specs)
    for arguments in (
        {"model": 3},
        {"weights_version": -1},
        {"weights_version": True},
        {"rank": 1},
        {"salt": "\ud800"},
    ):
        with pytest.raises(SpecError, match="namespace"):
            Namespace(**{"model": "m", "weights_version": 1, **arguments})
    with pytest.raises(InvalidInputError, match="tokens: wanted a flat sequence of integers, got float64"):
        KeyChain(Namespace("m", 1), LAYOUT).keys([0.5, 1, 2, 3])
    for parent in ("abc", b"", KeyChain(Namespace("m", 2), LAYOUT).key(None, [1])):  # also one from before a reset
        with pytest.raises(InvalidInputError, match="parent: wanted a key of this chain, or None, got"):
            KeyChain(Namespace("m", 1), LAYOUT).key(parent, [1])
    with pytest.raises(InvalidInputError, match="tokens: wanted 1 to 4 token ids, got 5"):
        KeyChain(Namespace("m", 1), LAYOUT).key(None, [1, 2, 3, 4, 5])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros((3, 3), "u1"), r"routing rows: wanted shape \(3, 2\), got shape \(3, 3\)"),
        (np.zeros((3, 2), "f4"), "routing rows: wanted dtype uint8, got dtype float32"),
        (np.full((3, 2), 256), r"routing rows: wanted uint8 values in \[0, 255\], got 256"),
        (np.full((3, 2), -1), r"routing rows: wanted uint8 values in \[0, 255\], got -1"),
        (np.full((3, 2), -1, "i1"), r"routing rows: wanted uint8 values in \[0, 255\], got -1"),
    ],
)
def test_rows_that_do_not_fit_are_named(values, message) -> None:
    with pytest.raises(RowError, match=message):
        LAYOUT.specs[0].rows(values, tokens=3)


@pytest.mark.parametrize("dtype", [">i4", "<i4", ">i8", ">u2", "i2"])
def test_rows_of_any_byte_order_are_the_same_rows(dtype) -> None:
    values = np.array([[1, 255], [0, 7]], dtype=dtype)
    assert np.array_equal(LAYOUT.specs[0].rows(values, tokens=2), values.astype(np.uint8))
    for bad in (256, 1 << 14):
        values[0, 0] = bad
        with pytest.raises(RowError, match=f"got {bad}"):
            LAYOUT.specs[0].rows(values, tokens=2)


@given(st.binary(min_size=16, max_size=40))
def test_an_adopted_digest_is_another_key_in_every_other_scope(digest: bytes) -> None:
    """Goal: an engine's own hashes never meet keys of tokens, nor those of another namespace or layout."""
    chains = [
        KeyChain(Namespace("m", version), RecordLayout((AuxBlockDataSpec("r", (width,), "uint8", 4),)))
        for version in (1, 2)
        for width in (1, 2)
    ]
    assert len({chain.adopt(digest) for chain in chains}) == 4
    assert chains[0].adopt(digest) == chains[0].adopt(bytes(digest))
    assert chains[0].adopt(b"\x06parent" + digest) != chains[0].adopt(digest)
    for bad in (digest[:15], bytes(1025), "x" * 16):
        with pytest.raises(InvalidInputError, match="digest"):
            chains[0].adopt(bad)


def test_what_has_not_the_form_of_a_key_is_none() -> None:
    """Goal: an engine's own hash is no key of ours. Method: what differs from a key in one respect, also where
    it begins as the chain's own keys do."""
    chain = KeyChain(Namespace("m", 1), RecordLayout((AuxBlockDataSpec("x", (1,), "uint8", 4),)))
    key = chain.key(None, [1, 2, 3, 4])
    assert is_key(key)
    assert chain.owns(key)
    for other in (key[:-1], key + b"\0", b"", bytearray(key), key.hex(), 7, None):
        assert not is_key(other), other
        assert not chain.owns(other), other
