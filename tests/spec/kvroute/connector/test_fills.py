"""Which blocks a step fills: the same in the same step as when every request were looked at in every step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st
from toy_engine import Asked

from kvroute.connector.fills import Fills

SIZE = 4
# What becomes of each request in a step: it ends and begins anew, its KV has failed, or it computes so many tokens.
happens = st.one_of(st.sampled_from(["begins", "fails"]), st.integers(0, 2 * SIZE + 1), st.just(1), st.just(1))


def all_of(request: Asked, done: int, n: int) -> tuple[int, int] | None:
    """The blocks that a step of ``n`` tokens completes; earlier state is not used."""
    at = request.num_computed_tokens
    first, last = min(done, at) // SIZE, min((at + n) // SIZE, len(request.block_hashes))
    return (first, last) if n and last > first and not 0 <= at - done < SIZE - n else None


@examples(100)
@given(st.lists(st.lists(happens, min_size=3, max_size=3), max_size=40), st.lists(st.booleans(), max_size=40))
def test_no_block_is_found_later_than_it_is_full(steps: list[list[int | str]], skips: list[bool]) -> None:
    """Goal: only a request that is looked at can fill a block. Method: three requests with and without loaded KV, in
    steps of any tokens and steps that store nothing, against a look at each of them in each step."""
    fills, done = Fills(256, SIZE, lambda _name, first, last: list(range(first, last))), dict[str, int]()
    requests = {str(i): Asked(str(i), range(200)) for i in range(3)}

    def begins(name: str) -> None:
        hit = SIZE * (int(name) % 2)
        requests[name].num_computed_tokens = done[name] = hit
        fills.ended(name)
        fills.admitted(requests[name], hit, loaded=bool(hit))

    for name in requests:
        begins(name)
    for i, each in enumerate(steps):
        scheduled, stores = dict[str, int](), not (i < len(skips) and skips[i])
        for (name, request), what in zip(requests.items(), each, strict=True):
            if what == "begins" or request.num_computed_tokens > 180:
                begins(name)
            elif what == "fails" and int(name) % 2:
                request.num_computed_tokens = 0
            elif isinstance(what, int):
                scheduled[name] = what
        wanted = {name: found for name, n in scheduled.items() if (found := all_of(requests[name], done[name], n))}
        found = {request.request_id: (a, b) for request, a, b in fills.step(scheduled, stores=stores)}
        assert found == (wanted if stores else {})
        if max(scheduled.values(), default=0) > 1:
            assert list(found) == [name for name in scheduled if name in found]
        if stores:
            done |= {name: last * SIZE for name, (_, last) in wanted.items()}
        for name, n in scheduled.items():
            requests[name].num_computed_tokens += n


def test_a_request_that_computes_nothing_hides_no_full_block() -> None:
    """Goal: a block is found in the step that fills it. Method: a request computes one token and then twice two, beside
    one that is scheduled for none."""
    fills, requests = Fills(256, SIZE, lambda *_: []), [Asked(name, range(2 * SIZE)) for name in "ab"]
    for request in requests:
        fills.admitted(request, 0, loaded=False)
    found = list[Any]()
    for n in (1, 2, 2):
        found.append([blocks for _, *blocks in fills.step({"a": n, "b": 0}, stores=True)])
        requests[0].num_computed_tokens += n
    assert found == [[], [], [[0, 1]]]


def test_a_call_that_raises_loses_no_request() -> None:
    """Goal: what a failed call was to look at is looked at with the next step. Method: three requests decode the last
    token of a block, of which the second has no hashes at first."""
    fills, requests = Fills(256, SIZE, lambda *_: []), [Asked(str(i), range(2 * SIZE)) for i in range(3)]
    hashes, scheduled = requests[1].block_hashes, dict.fromkeys("012", 1)
    for request in requests:
        fills.admitted(request, 0, loaded=False)
        request.num_computed_tokens = SIZE - 1
    del requests[1].block_hashes
    with pytest.raises(AttributeError):
        list(fills.step(scheduled, stores=True))
    requests[1].block_hashes = hashes
    for done in (1, 2):
        found = [(request.request_id, *blocks) for request, *blocks in fills.step(scheduled, stores=True)]
        assert found == [(name, done - 1, done) for name in scheduled]
        for request in requests:
            request.num_computed_tokens += 1
        for _ in range(SIZE - 1):
            assert not list(fills.step(scheduled, stores=True))
            for request in requests:
                request.num_computed_tokens += 1


def test_a_copy_has_of_the_kv_that_came_as_much_as_was_copied() -> None:
    """Goal: rows that came by their KV stay known as such in a copy. Method: a block whose rows came, and one whose did
    not, are each copied in part."""
    fills = Fills(8, SIZE, lambda *_: [])
    fills.by_kv([1], np.array([5]))
    fills.copied(1, 2, 3, np.array([5, 6]))
    fills.copied(4, 3, 3, np.array([7, 8]))
    fills.copied(2, 5, 1, np.array([6, 9]))
    slots, lives = np.arange(8 * SIZE), np.repeat([0, 5, 6, 8, 7, 9, 0, 0], SIZE)
    came = fills.slots_by_kv(slots, lives)
    assert came is not None
    assert came.reshape(8, SIZE).sum(1).tolist() == [0, 4, 3, 0, 0, 1, 0, 0]


def test_a_block_of_several_hashes_is_full_with_its_last_one() -> None:
    """Goal: hashes of parts of a block are not taken for those of blocks. Method: two hashes a block, one after another
    while a request grows."""
    fills, full = Fills(64, SIZE, lambda _name, first, last: list(range(first, last)), hashes=2), []
    request = Asked("a", range(200))
    parts = [bytes([number]) for number in range(100)]
    fills.admitted(request, 0, loaded=False)
    for at in range(40):
        request.num_computed_tokens, request.block_hashes = at, parts[: at // 2]
        full += [(at, first, last) for _, first, last in fills.step({"a": 1}, stores=True)]
    assert [(first, last) for _, first, last in full] == [(number, number + 1) for number in range(len(full))]
    assert all(len(parts[: at // 2]) >= 2 * last for at, _, last in full)
    assert len(full) >= 8
