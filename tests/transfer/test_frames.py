"""Payloads in bulk frames: what was joined comes apart as it was, and what was not joined by us is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.errors import RemoteProtocolError
from transfer.frames import join, split

payloads = st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=30)


@given(payloads, st.integers(1, 50), st.integers(40, 200))
def test_joined_payloads_come_apart_as_they_were(
    sent: list[bytes], joined_nbytes_max: int, frame_nbytes_max: int
) -> None:
    sizes = list(map(len, sent))
    frames = join(sent, sizes, joined_nbytes_max, frame_nbytes_max)
    assert b"".join(frames) == b"".join(sent)
    assert all(len(frame) <= frame_nbytes_max for frame in frames)
    assert [bytes(p) for p in split([memoryview(f) for f in frames], sizes)] == sent


@given(payloads, st.integers(1, 50))
def test_large_payloads_are_sent_from_where_they_lie(sent: list[bytes], joined_nbytes_max: int) -> None:
    views = [memoryview(bytearray(p)) for p in sent]
    frames = join(views, list(map(len, sent)), joined_nbytes_max, 1 << 20)
    large = [view for view in views if view.nbytes > joined_nbytes_max]
    assert [frame for frame in frames if any(frame is view for view in large)] == large


@given(st.lists(st.binary(max_size=60), max_size=8), st.lists(st.integers(1, 20), min_size=1, max_size=12))
def test_frames_end_where_payloads_do_or_are_refused(frames: list[bytes], sizes: list[int]) -> None:
    """Goal: whatever frames come, a payload is a whole one of its entry's size, at its place, or nothing is.

    Method: the cuts that sizes allow, found here by walking over the bytes, against what is answered.
    """
    views = [memoryview(frame) for frame in frames]
    ends, end = {0}, 0
    for size in sizes:
        end += size
        ends.add(end)
    cuts, cut = [], 0
    for frame in frames:
        cut += len(frame)
        cuts.append(cut)
    if len(frames) == len(sizes):
        assert list(split(views, sizes)) == views
    elif cut == end and set(cuts) <= ends:
        parts = split(views, sizes)
        assert [p.nbytes for p in parts] == sizes
        assert b"".join(parts) == b"".join(frames)
    else:
        with pytest.raises(RemoteProtocolError):
            split(views, sizes)
