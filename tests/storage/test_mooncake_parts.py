"""The parts of the Mooncake store that decide: breaker, arena, codes, the child's own guards."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache_manager.errors import ConfigError, StorageError, StoreUnavailableError
from cache_manager.storage import open_store
from cache_manager.storage.arena import CALLS_MAX, Arena, Ranges
from cache_manager.storage.mooncake import link as link_module
from cache_manager.storage.mooncake import wire
from cache_manager.storage.mooncake.breaker import TRANSITIONS, Breaker, Event, State
from cache_manager.storage.mooncake.client import ClientLostError, NativeClient
from cache_manager.storage.mooncake.link import Link
from cache_manager.storage.mooncake.master import pool_usage
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
    """Ranges never overlap, and are lent again only when their native call has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(1 << 16)
        self.used: list[Ranges] = []

    def teardown(self) -> None:
        for lent in self.used:
            lent.call.set_result([])
        assert self.arena.idle
        self.arena.close()

    @rule(sizes=st.lists(st.integers(1, 1000), max_size=8), called=st.booleans())
    def lend(self, sizes: list[int], called: bool) -> None:
        try:
            with self.arena.lend(sizes, 0.0) as lent:
                ranges = sorted(zip(lent.offsets, lent.nbytes, strict=True))
                ranges += [pair for other in self.used for pair in zip(other.offsets, other.nbytes, strict=True)]
                assert lent.nbytes == sizes
                assert all(at % 64 == 0 and 0 <= at <= self.arena.nbytes - n for at, n in ranges)
                ranges.sort()
                assert all(at + n <= then for (at, n), (then, _) in itertools.pairwise(ranges))
                if called:
                    lent.call = Future()
                    self.used.append(lent)
        except StorageError:
            assert len(self.used) == CALLS_MAX

    @precondition(lambda self: self.used)
    @rule(draw=st.data())
    def a_call_ends(self, draw: st.DataObject) -> None:
        self.used.pop(draw.draw(st.integers(0, len(self.used) - 1))).call.set_exception(StorageError("lost"))

    @invariant()
    def is_idle_when_no_call_runs(self) -> None:
        assert self.arena.idle == (not self.used)


TestArena = ArenaMachine.TestCase


def test_a_full_arena_is_waited_for_until_the_deadline() -> None:
    arena, calls = Arena(1 << 16), []
    for _ in range(CALLS_MAX):
        with arena.lend([64], 0.0) as lent:
            calls.append(Future())
            lent.call = calls[-1]
    begun_s = time.monotonic()
    with pytest.raises(StorageError, match="stayed full"), arena.lend([64], begun_s + 0.1):
        pass
    assert time.monotonic() - begun_s >= 0.1
    ending = threading.Thread(target=calls.pop().set_result, args=([],), daemon=True)
    ending.start()
    with arena.lend([64], time.monotonic() + 60):
        assert not arena.idle
    ending.join(60)
    for call in calls:
        call.set_result([])
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


@pytest.mark.parametrize(
    ("url", "field"),
    [
        ("mooncake:///prefix", "master"),
        ("mooncake://127.0.0.1/prefix", "master"),
        ("mooncake://127.0.0.1:50051?segment=1MiB", "segment"),
        ("mooncake://127.0.0.1:50051?arena=4KiB", "arena"),
        ("mooncake://127.0.0.1:50051?timeout_ms=0", "timeout_ms"),
        ("mooncake://127.0.0.1:50051?timeout_ms=1s", "timeout_ms"),
        ("mooncake://127.0.0.1:50051?quota=1GiB", "parameter"),
        ("mooncake://127.0.0.1:50051/a b", "path"),
    ],
)
def test_a_url_that_cannot_be_names_the_field(url: str, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        open_store(url)


@pytest.mark.parametrize("timeout_s", [-1.0, 0.0])
def test_a_question_for_which_no_time_is_left_opens_no_socket(timeout_s: float) -> None:
    """A bug that was found: a socket refuses a negative time, and stayed open, which is an error of the run here."""
    with pytest.raises(StorageError, match="no time is left"):
        pool_usage(("127.0.0.1", 9), timeout_s)
    gc.collect()


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


class Connected:
    """Stands for a native client that is set up; answers Exist with ``code``, and no put."""

    code = 0

    def __init__(self, *_: object) -> None: ...

    def set_up(self, *_: object) -> None: ...

    def call(self, request: wire.Request, *_: object) -> list[int]:
        if isinstance(request, wire.Exist):
            return [self.code]
        raise ClientLostError("put is not answered")

    def kill(self) -> None: ...


@pytest.mark.parametrize(("code", "reason"), [(-900, "are its version and ours equal"), (0, "put is not answered")])
def test_a_master_that_fails_the_first_calls_is_an_error_that_says_so(
    code: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug that was found: the error of the trial had a view of the arena, which then could not be closed."""
    monkeypatch.setattr(Connected, "code", code)
    monkeypatch.setattr(link_module, "NativeClient", Connected)
    monkeypatch.setattr(link_module, "reach", lambda *_: "127.0.0.1")
    monkeypatch.setattr(link_module, "check_ready", lambda *_: None)
    with pytest.raises(StorageError, match=reason):
        Link(MooncakeSettings("h:1"))


class Silent(Connected):
    """A pool of one object in memory, whose master stops answering."""

    def __init__(self, arena: Arena, *_: object) -> None:
        self._arena, self._object, self.gone = arena, b"", False

    def end(self) -> None:
        self.gone = True

    def call(self, request: wire.Request, *_: object) -> list[int]:
        if self.code:
            return [self.code]
        if isinstance(request, wire.Put):
            self._object = bytes(self._arena.view[request.offsets[0] : request.offsets[0] + request.nbytes[0]])
        if isinstance(request, wire.Get):
            self._arena.view[request.offsets[0] : request.offsets[0] + len(self._object)] = self._object
            return [len(self._object)]
        return [0]


@pytest.mark.parametrize("code", [-901, -900])
def test_a_master_that_the_native_client_gives_up_costs_one_call(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: one deadline, whoever notices first that it is over. Method: the client's answer opens both breakers."""
    monkeypatch.setattr(link_module, "NativeClient", Silent)
    monkeypatch.setattr(link_module, "reach", lambda *_: "127.0.0.1")
    monkeypatch.setattr(link_module, "check_ready", lambda *_: None)
    link = Link(MooncakeSettings("h:1", pause_ms=600_000, pause_max_ms=600_000))
    give_up_s = time.monotonic() + 60
    assert link.ask(link.reads, wire.Exist, [b"k" * 32], give_up_s) == [0]
    monkeypatch.setattr(Silent, "code", code)
    with pytest.raises(StorageError, match=f"code {code}"):
        link.ask(link.reads, wire.Exist, [b"k" * 32], give_up_s)
    assert (link.reads.state, link.writes.state) == (State.OPEN, State.OPEN)
    for breaker, what in ((link.reads, wire.Exist), (link.writes, wire.Remove)):
        with pytest.raises(StoreUnavailableError, match="is not asked"):
            link.ask(breaker, what, [b"k" * 32], give_up_s)
    assert link.counts["bypassed"] == 2
    link.close()
