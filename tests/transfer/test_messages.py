"""Messages: what comes out is what went in, and bytes that are no message are one error and nothing else."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.errors import RemoteProtocolError, TransferError
from transfer.messages import (
    BLOCKS_MAX,
    CONTROL_NBYTES_MAX,
    ENTRIES_MAX,
    FIELDS_MAX,
    KINDS,
    MAGIC,
    MAJOR,
    MODEL_MAX,
    PARTS_MAX,
    PREFIX,
    Abort,
    Absent,
    Ack,
    Bye,
    Credit,
    Entry,
    Gone,
    Hello,
    Later,
    Outcome,
    Part,
    Place,
    Pull,
    Range,
    Records,
    Refuse,
    Space,
    Welcome,
    decode,
    encode,
)

DOC = Path(__file__).parents[2] / "docs" / "protocol.md"
ids = st.binary(min_size=16, max_size=16)
counts = st.integers(0, (1 << 31) - 1)
nbytes = st.integers(0, (1 << 62) - 1)
epochs = st.integers(1, (1 << 31) - 1)
texts = st.text(max_size=40)
indices = st.integers(0, BLOCKS_MAX - 1)
part_indices = st.integers(0, PARTS_MAX - 1)
keys = st.binary(min_size=32, max_size=32)
parts = st.lists(
    st.builds(Part, st.text(min_size=1, max_size=8), ids, st.integers(1, 1 << 30), st.integers(1, 65_536)),
    min_size=1,
    max_size=3,
)
wants = st.lists(st.builds(Range, indices, st.integers(1, 255), st.binary(min_size=32, max_size=96)), max_size=5)
spaces = st.builds(Space, texts, nbytes, ids, counts, counts)
entries = st.lists(
    st.builds(Entry, part_indices, indices, st.binary(min_size=128, max_size=192)), min_size=1, max_size=4
)
places = st.lists(st.builds(Place, part_indices, indices), min_size=1, max_size=5)
messages = st.one_of(
    st.builds(Hello, ids, spaces, parts, counts, nbytes),
    st.builds(Welcome, ids, spaces, parts, counts, epochs, ids),
    st.builds(Refuse, texts, texts, texts, ids),
    st.builds(Pull, ids, ids, epochs, wants, nbytes),
    st.builds(Credit, ids, ids, epochs, nbytes),
    st.builds(Ack, ids, ids, epochs, counts, counts),
    st.builds(Abort, ids, ids, texts),
    st.builds(Records, ids, epochs, entries),
    st.builds(Absent, ids, epochs, places),
    st.builds(Gone, ids, st.sampled_from(Outcome)),
    st.builds(Bye, ids),
    st.builds(Later, ids, epochs),
)


def accepts(frame: bytes) -> None:
    """Decode hostile bytes: a message of this protocol or the protocol's error."""
    try:
        assert isinstance(decode(frame), KINDS)
    except RemoteProtocolError as error:
        assert isinstance(error, TransferError)  # noqa: PT017 - the error is one outcome of two


@given(messages)
def test_what_comes_out_is_what_went_in(message) -> None:
    assert decode(encode(message)) == message
    assert decode(memoryview(encode(message))) == message


@given(st.binary(max_size=200))
def test_random_bytes_are_no_message(frame: bytes) -> None:
    accepts(frame)


@given(st.integers(0, 255), st.binary(max_size=200))
def test_random_bodies_after_a_valid_prefix(kind: int, body: bytes) -> None:
    accepts(PREFIX.pack(MAGIC, MAJOR, kind, 0) + body)


@given(messages, st.data())
def test_damaged_messages(message, data) -> None:
    """Method: flip bits, cut, or put bytes in; what still decodes is a message whose bounds hold."""
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(frame) - 1)))
        what = data.draw(st.sampled_from(("flip", "cut", "insert")))
        if what == "flip" and frame:
            frame[at] ^= 1 << data.draw(st.integers(0, 7))
        elif what == "cut":
            del frame[at:]
        else:
            frame[at:at] = data.draw(st.binary(max_size=6))
    accepts(bytes(frame))


@pytest.mark.parametrize("kind", range(1, 14))
@pytest.mark.parametrize(
    "body",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1 elements
        b"\xdf\xff\xff\xff\xff",  # a map of as many
        b"\xc6\xff\xff\xff\xff",  # as many bytes
        b"\x91" * 200_000,  # arrays in arrays
        b"\x9f\x04" + b"\x91" * 100_000,
        b"\xc9\xff\xff\xff\xff\x01",  # an extension
    ],
)
def test_huge_lengths_and_deep_nesting_cost_no_memory(kind: int, body: bytes) -> None:
    tracemalloc.start()
    try:
        for start in (b"", bytes([0x96, kind]), bytes([0x96, kind]) + 2 * (b"\xc4\x10" + bytes(16)) + b"\x01"):
            with pytest.raises(RemoteProtocolError):
                decode(PREFIX.pack(MAGIC, MAJOR, kind, 0) + start + body)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_the_prefix_is_looked_at_first() -> None:
    good = encode(Bye(bytes(16)))
    for bad, what in (
        (b"KVRX" + good[4:], "magic"),
        (good[:4] + b"\x01" + good[5:], "protocol"),
        (good[:5] + b"\x63" + good[6:], "kind"),
        (good[:6] + b"\x01" + good[7:], "reserved"),
        (good[:8], "frame"),
        (b"", "frame"),
        (good.ljust(CONTROL_NBYTES_MAX + 1, b"\0"), "frame"),
        (good[:5] + b"\x06" + good[6:], "body"),  # the kind outside is not the kind inside
        (good + b"\0", "body"),
    ):
        with pytest.raises(RemoteProtocolError, match=what):
            decode(bad)


def test_later_minors_may_append_fields() -> None:
    body = msgspec.msgpack.encode([11, bytes(16), "something new", {"deep": [1, 2]}])
    assert decode(PREFIX.pack(MAGIC, MAJOR, 11, 0) + body) == Bye(bytes(16))


@pytest.mark.parametrize(
    "largest",
    [
        Hello(
            bytes(16),
            Space("\u6a21" * MODEL_MAX, 1, bytes(16), 0, 1),
            [Part("p" * 64, bytes(16), 1, 1, True, {f"{i:64}": "\u6a21" * 512 for i in range(FIELDS_MAX)})] * PARTS_MAX,
            0,
            1,
        ),
        Pull(bytes(16), bytes(16), (1 << 31) - 1, [Range(0, 255, bytes(32 * BLOCKS_MAX))], (1 << 62) - 1),
        Pull(bytes(16), bytes(16), (1 << 31) - 1, [Range(BLOCKS_MAX - 1, 255, bytes(32))] * BLOCKS_MAX, (1 << 62) - 1),
        Absent(bytes(16), (1 << 31) - 1, [Place(PARTS_MAX - 1, BLOCKS_MAX - 1)] * (BLOCKS_MAX * PARTS_MAX)),
        Records(bytes(16), (1 << 31) - 1, [Entry(PARTS_MAX - 1, BLOCKS_MAX - 1, bytes(960))] * ENTRIES_MAX),
    ],
    ids=lambda m: type(m).__name__,
)
def test_the_largest_messages_fit_a_frame(largest) -> None:
    assert decode(encode(largest)) == largest


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_list_has_a_bound(kind) -> None:
    """Goal: nobody makes this side hold more than a frame's worth. Method: look at the types."""
    for field in msgspec.structs.fields(kind):
        info = msgspec.inspect.type_info(field.type)
        if isinstance(info, (msgspec.inspect.ListType, msgspec.inspect.BytesType)):
            assert info.max_length is not None, f"{kind.__name__}.{field.name}"
        if isinstance(info, msgspec.inspect.StrType):
            assert info.max_length is not None, f"{kind.__name__}.{field.name}"


def test_the_byte_table_is_the_code() -> None:
    """Goal: docs/protocol.md tells the truth. Method: its tables against prefix, kinds, fields and enums."""
    text = DOC.read_text()
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| (P|D|both) \| (.*?) \|", text, flags=re.MULTILINE)
    documented = [(int(kind), name, re.findall(r"`(\w+)`", fields)) for kind, name, _, fields in rows]
    assert documented == [(k.__struct_config__.tag, k.__name__, list(k.__struct_fields__)) for k in KINDS]
    for struct in (Part, Space, Range, Entry, Place):
        (line,) = re.findall(rf"^\| `{struct.__name__}` \| (.*?) \|", text, flags=re.MULTILINE)
        assert re.findall(r"`(\w+)`", line) == list(struct.__struct_fields__)
    prefix = re.findall(r"^\| (\d+) \| (\d+) \| (magic|major|kind|reserved) \|", text, flags=re.MULTILINE)
    assert prefix == [("0", "4", "magic"), ("4", "1", "major"), ("5", "1", "kind"), ("6", "2", "reserved")]
    assert PREFIX.size == 8
    assert encode(Bye(bytes(16)))[:8] == b"KVRT\x02\x0b\x00\x00"
    assert all(f"`{value.value}`" in text for value in Outcome)
    assert f"{CONTROL_NBYTES_MAX:,}" in text
    assert f"{BLOCKS_MAX:,}" in text
