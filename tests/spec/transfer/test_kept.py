"""Memory in which messages are assembled: which message's bytes are in it, and when it is reused."""

from __future__ import annotations

import numpy as np
from budget import examples
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.record import Buffer
from transfer.kept import BUFFERS_MAX, KeptBuffers
from transfer.messages import JOINED_NBYTES_MAX

HALF = JOINED_NBYTES_MAX // 2 + 1


def pair(number: int, nbytes: int = HALF) -> list[Buffer]:
    """Two payloads, as bytes and as rows of an array, [2, bytes / 2] uint8."""
    return [bytes([number]) * nbytes, np.full((2, nbytes // 2), number + 1, np.uint8).data]


def together(kept: KeptBuffers, number: int) -> memoryview:
    view = kept.together(pair(number))
    assert isinstance(view, memoryview), "a copy of its own"
    assert view == b"".join(pair(number))
    return view


@examples(30)
@given(st.data())
def test_what_is_sent_is_not_written_over(data: st.DataObject) -> None:
    """Goal: bytes stay as long as any view of them exists. Method: messages that are dropped in any order, or by
    half."""
    kept, sent = KeptBuffers(), dict[int, Buffer]()
    for number in range(data.draw(st.integers(1, 2 * BUFFERS_MAX))):
        whole = kept.together(pair(number))
        sent[number] = memoryview(whole)[:HALF] if data.draw(st.booleans()) else whole
        for done in data.draw(st.sets(st.sampled_from(sorted(sent)), max_size=3)):
            assert sent.pop(done)[:HALF] == pair(done)[0]
    for number, view in sent.items():
        assert view in (pair(number)[0], b"".join(pair(number)))


def test_a_buffer_is_used_again_when_it_was_sent() -> None:
    """Goal: memory of sent messages is reused, up to a bound. Method: identify the memory by its object."""
    kept = KeptBuffers()
    first = together(kept, 1).obj
    assert together(kept, 2).obj is first
    views = [together(kept, number) for number in range(BUFFERS_MAX)]
    assert len({id(view.obj) for view in views}) == BUFFERS_MAX
    assert isinstance(kept.together(pair(7)), bytes), "all are being sent: a copy of its own"
    oldest = views.pop(0).obj
    assert together(kept, 8).obj is oldest


def test_a_slow_peer_keeps_its_own_buffers_alone() -> None:
    """Goal: what one peer does not take holds up no reuse for others. Method: two messages stay, one of them the first;
    the others go at once, from one buffer, however many there are."""
    kept = KeptBuffers()
    slow = [together(kept, 1), together(kept, 2)]
    used = {id(together(kept, number).obj) for number in range(3, 4 * BUFFERS_MAX)}
    assert len(used) == 1
    assert [view == b"".join(pair(number)) for number, view in enumerate(slow, 1)] == [True, True]
