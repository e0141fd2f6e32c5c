"""Messages: decoding returns what was encoded, and bytes that are no message are one error and nothing else."""

from __future__ import annotations

import contextlib
import re
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import transfer.messages as wire
from transfer.errors import RemoteProtocolError
from transfer.messages import (
    BLOCKS_MAX,
    CONTROL_NBYTES_MAX,
    JOINED_NBYTES_MAX,
    KINDS,
    MAGIC,
    MAJOR,
    PREFIX,
    Bye,
    Outcome,
    decode,
    encode,
    join,
    split,
)

DOC = Path(__file__).parents[3] / "docs" / "protocol.md"
ids = st.binary(min_size=16, max_size=16)
lengths = st.integers(1, 1 << 20)
parts = st.lists(
    st.builds(wire.Part, st.text(min_size=1, max_size=8), ids, lengths, st.integers(1, 65_536)), min_size=1, max_size=3
)
wants = st.lists(
    st.builds(wire.Range, st.integers(0, 99), st.integers(1, 255), st.binary(min_size=32, max_size=96)), max_size=5
)
spaces = st.builds(wire.Space, st.text(max_size=40), lengths, ids, lengths, lengths)
places = {"part": st.integers(0, 7), "index": st.integers(0, BLOCKS_MAX - 1)}
texts, entries = st.text(max_size=40), st.builds(wire.Entry, **places, header=st.binary(min_size=128, max_size=192))
OF = {
    "namespace": spaces, "parts": parts, "wanted": wants, "outcome": st.sampled_from(Outcome), "epoch": lengths,
    "lease_ms": lengths, "reason": texts, "boot_id": ids, "transfer": ids, "identity": ids,
}  # fmt: skip
MORE = {
    wire.Records: {"entries": st.lists(entries, min_size=1, max_size=4)},
    wire.Absent: {"entries": st.lists(st.builds(wire.Place, **places), min_size=1, max_size=5)},
}
messages = st.one_of(
    st.builds(kind, **{n: (OF | MORE.get(kind, {}))[n] for n in kind.__struct_fields__}) for kind in KINDS
)


def accepts(frame: bytes) -> None:
    """Decode hostile bytes: a message of this protocol or the protocol's error."""
    with contextlib.suppress(RemoteProtocolError):
        assert isinstance(decode(frame), KINDS)


@given(messages)
def test_what_comes_out_is_what_went_in(message) -> None:
    assert decode(encode(message)) == message
    assert decode(memoryview(encode(message))) == message


@given(st.integers(0, 255), st.binary(max_size=200))
def test_random_bytes_are_no_message(kind: int, body: bytes) -> None:
    accepts(body)
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


@pytest.mark.parametrize("kind", range(1, 12))
@pytest.mark.parametrize(
    "body",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1 elements
        b"\xdf\xff\xff\xff\xff",  # a map of as many
        b"\xc6\xff\xff\xff\xff",  # as many bytes
        b"\x91" * 200_000,  # arrays in arrays
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


HELLO_OF_MAJOR_3 = PREFIX.pack(MAGIC, 3, 1, 0) + msgspec.msgpack.encode(
    [1, bytes(16), ["m", 1, bytes(16), 0, 1], [["rows", bytes(16), 64, 4, True, {}]]]
)
"""What a peer of protocol 3 says first. Kinds have other numbers since: it must not be taken for one of those."""


def test_the_prefix_is_looked_at_first() -> None:
    good = encode(Bye(bytes(16)))
    for bad, what in (
        (b"KVRX" + good[4:], "magic"),
        (good[:4] + b"\x01" + good[5:], "protocol"),
        (HELLO_OF_MAJOR_3, "protocol: wanted 4, got 3"),
        (good[:5] + b"\x63" + good[6:], "kind"),
        (good[:6] + b"\x01" + good[7:], "reserved"),
        (good[:8], "frame"),
        (b"", "frame"),
        (good.ljust(CONTROL_NBYTES_MAX + 1, b"\0"), "frame"),
        (good[:5] + b"\x04" + good[6:], "body"),  # the kind outside is not the kind inside
        (good + b"\0", "body"),
    ):
        with pytest.raises(RemoteProtocolError, match=what):
            decode(bad)
    body = msgspec.msgpack.encode([9, bytes(16), "something new", {"deep": [1, 2]}])
    assert decode(PREFIX.pack(MAGIC, MAJOR, 9, 0) + body) == Bye(bytes(16)), "fields may be appended"


FIELDS = {f"{i:64}": "\u6a21" * 512 for i in range(wire.FIELDS_MAX)}
LATE = (1 << 31) - 1


@pytest.mark.parametrize(
    "largest",
    [
        wire.Refuse(
            bytes(16),
            bytes(16),
            wire.Space("\u6a21" * wire.MODEL_MAX, 1, bytes(16), 0, 1),
            [wire.Part("p" * 64, bytes(16), 1, 1, True, FIELDS)] * wire.PARTS_MAX,
        ),
        wire.Pull(bytes(16), bytes(16), LATE, bytes(16), [wire.Range(0, 255, bytes(32 * BLOCKS_MAX))]),
        wire.Pull(bytes(16), bytes(16), LATE, bytes(16), [wire.Range(BLOCKS_MAX - 1, 255, bytes(32))] * BLOCKS_MAX),
        wire.Absent(bytes(16), bytes(16), LATE, [wire.Place(7, BLOCKS_MAX - 1)] * (BLOCKS_MAX * wire.PARTS_MAX)),
        wire.Records(bytes(16), bytes(16), LATE, LATE, [wire.Entry(7, BLOCKS_MAX - 1, bytes(960))] * wire.ENTRIES_MAX),
    ],
    ids=lambda m: type(m).__name__,
)
def test_the_largest_messages_fit_a_frame(largest) -> None:
    assert decode(encode(largest)) == largest


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_list_has_a_bound(kind) -> None:
    """Goal: no peer can make this side hold more than a frame's worth. Method: look at the types."""
    bounded = msgspec.inspect.ListType | msgspec.inspect.BytesType | msgspec.inspect.StrType
    for field in msgspec.structs.fields(kind):
        info = msgspec.inspect.type_info(field.type)
        assert not isinstance(info, bounded) or info.max_length is not None, f"{kind.__name__}.{field.name}"


def test_the_byte_table_is_the_code() -> None:
    """Goal: docs/protocol.md is true. Method: its tables against prefix, kinds, fields and enums."""
    text = DOC.read_text()
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| (P|D|both) \| (.*?) \|", text, flags=re.MULTILINE)
    documented = [(int(kind), name, re.findall(r"`(\w+)`", fields)) for kind, name, _, fields in rows]
    assert documented == [(k.__struct_config__.tag, k.__name__, list(k.__struct_fields__)) for k in KINDS]
    for struct in (wire.Part, wire.Space, wire.Range, wire.Entry, wire.Place):
        (line,) = re.findall(rf"^\| `{struct.__name__}` \| (.*?) \|", text, flags=re.MULTILINE)
        assert re.findall(r"`(\w+)`", line) == list(struct.__struct_fields__)
    prefix = re.findall(r"^\| (\d+) \| (\d+) \| (magic|major|kind|reserved) \|", text, flags=re.MULTILINE)
    assert prefix == [("0", "4", "magic"), ("4", "1", "major"), ("5", "1", "kind"), ("6", "2", "reserved")]
    assert encode(Bye(bytes(16)))[: PREFIX.size] == b"KVRT\x04\x09\x00\x00"
    assert all(f"`{value.value}`" in text for value in Outcome)
    assert all(f"{value:,}" in text for value in (CONTROL_NBYTES_MAX, BLOCKS_MAX, wire.RECORD_NBYTES_MAX))


# ---------------------------------------------------------------- bulk


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), min_size=1, max_size=30))
def test_joined_payloads_come_apart_as_they_were(sizes: list[tuple[bool, int]]) -> None:
    """Goal: small neighbours share a frame; large payloads are sent from where they lie."""
    sent = [memoryview(bytearray([n]) * (n + JOINED_NBYTES_MAX * large)) for large, n in sizes]
    frames = join(sent)
    assert [bytes(p) for p in split([memoryview(f) for f in frames], [p.nbytes for p in sent])] == sent
    large = [p for p in sent if p.nbytes > JOINED_NBYTES_MAX]
    assert [frame for frame in frames if any(frame is p for p in large)] == large
    assert len(frames) <= 2 * len(large) + 1


@given(st.lists(st.binary(max_size=60), max_size=8), st.lists(st.integers(1, 20), min_size=1, max_size=12))
def test_frames_end_where_payloads_do_or_are_refused(frames: list[bytes], sizes: list[int]) -> None:
    """Goal: whatever frames come, either every payload is whole, of its entry's size and at its place, or there is
    none.

    Method: the cuts that sizes allow, found here by walking over the bytes, against what is answered.
    """
    views = [memoryview(frame) for frame in frames]
    ends, end = {0}, 0
    for size in sizes:
        ends.add(end := end + size)
    cuts, cut = set(), 0
    for frame in frames:
        cuts.add(cut := cut + len(frame))
    if len(frames) == len(sizes):
        assert list(split(views, sizes)) == views
    elif cut == end and cuts <= ends:
        found = split(views, sizes)
        assert [p.nbytes for p in found] == sizes
        assert b"".join(found) == b"".join(frames)
    else:
        with pytest.raises(RemoteProtocolError):
            split(views, sizes)
