"""The parts of the Mooncake store that decide: breaker, arena, codes, the child's own guards."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache_manager.errors import StorageError
from cache_manager.storage.breaker import TRANSITIONS, Breaker, Event, State
from cache_manager.storage.mooncake import wire
from cache_manager.storage.mooncake.arena import Arena
from cache_manager.storage.mooncake.client import NativeClient
from cache_manager.storage.mooncake.settings import MooncakeSettings
from cache_manager.storage.url import StoreUrl


class BreakerMachine(RuleBasedStateMachine):
    """Calls and probes end in any order, also those that began before the breaker opened."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker(failures_max=3, pause_s=1.0, pause_max_s=8.0)
        self.now_s = 0.0
        self.in_a_row = 0
        self.opened_at_s = 0.0

    @rule(seconds=st.integers(0, 20))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds

    @rule()
    def a_call_succeeds(self) -> None:
        self.in_a_row = 0 if self.breaker.closed else self.in_a_row
        self.breaker.succeeded()

    @rule(fatal=st.booleans())
    def a_call_fails(self, fatal: bool) -> None:
        closed = self.breaker.closed
        self.in_a_row += closed
        self.breaker.failed(self.now_s, "cause", fatal=fatal)
        if closed:
            assert self.breaker.closed == (not fatal and self.in_a_row < 3)
            self.opened_at_s = self.now_s

    @precondition(lambda self: self.breaker.due(self.now_s))
    @rule()
    def a_probe_begins(self) -> None:
        assert self.now_s - self.opened_at_s >= 1.0
        self.breaker.begin_probe()

    @precondition(lambda self: self.breaker.state is State.HALF_OPEN)
    @rule(good=st.booleans())
    def a_probe_ends(self, good: bool) -> None:
        self.breaker.end_probe(self.now_s, good=good)
        assert self.breaker.closed == good
        self.in_a_row = 0 if good else self.in_a_row
        self.opened_at_s = self.now_s

    @invariant()
    def a_pause_has_a_limit_and_a_cause(self) -> None:
        if self.breaker.state is State.OPEN:
            assert 1.0 <= self.breaker.until - self.opened_at_s <= 8.0
            assert self.breaker.cause == "cause"


TestBreaker = BreakerMachine.TestCase


def test_every_pair_of_state_and_event_is_decided_or_a_bug() -> None:
    for state in State:
        for event in Event:
            breaker = Breaker(1, 1.0, 1.0)
            breaker.state = state
            if event not in TRANSITIONS[state]:
                with pytest.raises(AssertionError, match=f"{event.value} while {state.value}"):
                    breaker._apply(event)


class ArenaMachine(RuleBasedStateMachine):
    """Ranges never overlap, none is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(1 << 16)
        self.taken: dict[int, int] = {}

    def teardown(self) -> None:
        for offset in self.taken:
            self.arena.give(offset)
        assert self.arena.take(self.arena.nbytes, 0.0) == 0
        self.arena.close()

    @rule(nbytes=st.integers(1, 1 << 15))
    def take(self, nbytes: int) -> None:
        offset = self.arena.take(nbytes, 0.0)
        if offset is None:
            return
        assert offset % 64 == 0
        assert 0 <= offset <= self.arena.nbytes - nbytes
        assert all(offset + nbytes <= at or at + n <= offset for at, n in self.taken.items())
        self.taken[offset] = nbytes

    @precondition(lambda self: self.taken)
    @rule(draw=st.data())
    def give(self, draw: st.DataObject) -> None:
        offset = draw.draw(st.sampled_from(sorted(self.taken)))
        del self.taken[offset]
        self.arena.give(offset)

    @invariant()
    def bytes_taken_plus_free_equal_capacity(self) -> None:
        assert self.arena.taken_nbytes == sum(-(-n // 64) * 64 for n in self.taken.values())


TestArena = ArenaMachine.TestCase


def test_a_full_arena_is_waited_for_until_the_deadline() -> None:
    arena = Arena(4096)
    offset = arena.take(4096, 0.0)
    assert offset == 0
    begun_s = time.monotonic()
    assert arena.take(64, begun_s + 0.1) is None
    assert 0.1 <= time.monotonic() - begun_s < 2.0
    giver = threading.Timer(0.05, arena.give, (0,))
    giver.start()
    assert arena.take(64, time.monotonic() + 5) == 0
    giver.join()
    arena.give(0)
    arena.close()


@given(st.integers(-2000, -1))
def test_a_code_is_one_thing(code: int) -> None:
    sets = (wire.MISSES, wire.BUGS, wire.REFUSALS)
    assert [*(code in each for each in sets), wire.is_failure(code)].count(True) == 1
    assert code not in wire.MASTER or wire.is_failure(code)
    assert str(code) in wire.describe(code)
    assert wire.NAMES.get(code, "") in wire.describe(code)


def test_a_url_sets_what_it_names() -> None:
    url = "mooncake://h:1/a/b?segment=16MiB&arena=2MiB&admin=h:2&host=x&protocol=rdma&device=mlx5_0&timeout_ms=7&log=/l"
    settings = MooncakeSettings.from_url(StoreUrl.parse(url))
    assert (settings.master, settings.prefix, settings.admin_address) == ("h:1", "a/b", ("h", 2))
    assert (settings.segment_nbytes, settings.arena_nbytes, settings.timeout_ms) == (16 << 20, 2 << 20, 7)
    assert settings.log == Path("/l")
    plain = MooncakeSettings.from_url(StoreUrl.parse("mooncake://h:1"))
    assert (plain.prefix, plain.admin_address, plain.timeout_ms) == ("kvroute", ("h", 9003), 3000)


def test_a_call_before_set_up_is_an_error_and_no_crash() -> None:
    """Method: the child itself is asked too early; it answers, and goes on answering."""
    arena = Arena(1 << 16)
    client = NativeClient(arena, 1_000, None)
    try:
        for request in (wire.Exist(["k"]), wire.Get(["k"], [0], [64]), wire.Remove(["k"])):
            with pytest.raises(StorageError, match="before set-up"):
                client.call(request, 10.0)
        with pytest.raises(StorageError, match="with a master"):
            client.call(wire.SetUp("", "h", "tcp", "", 0, 0), 10.0)
    finally:
        client.close(5.0)
    assert client.gone or client.in_flight == 0
    with pytest.raises(StorageError, match="ended"):
        client.call(wire.Exist(["k"]), 5.0)
    arena.close()
