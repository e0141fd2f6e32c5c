"""Rollouts apart: a process of its own stores the rows of ended requests, and dies as it likes; no row is wrong, and
none is missing without a reason."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_engine import Toy, admitted, held, judge, row_of, stepped
from toy_requests import EXPERTS, TOKENS, TOP_K
from waiting import GIVE_UP_S, send_signal, until

from cache_manager.errors import ConfigError, KVRouteError, RowError
from cache_manager.keys import Namespace
from cache_manager.regions.directory import region_path
from cache_manager.storage.apart import ApartStore
from kvroute.connector import Engine, Key, SchedulerRows, Settings, Tokens, routes
from kvroute.connector.key import rollout_id
from kvroute.connector.left import left_values
from kvroute.connector.rollouts_apart import RolloutsApart
from kvroute.connector.settings import Common
from kvroute.connector.worker import WorkerRows
from kvroute.rollout import RolloutStore, open_rollouts
from kvroute.routes import Routes
from kvroute.routing import routing_spec

FIRST, SECOND = [3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8]
BLOCKS = [5, 2]
PROMPT = 3


class Takers:
    """The takers that were started, and which questions they ask."""

    def __init__(self) -> None:
        self.made: list[RolloutsApart] = []
        self.asked = threading.Semaphore(0)

    def __call__(self) -> RolloutsApart:
        return self.made[-1]

    @property
    def pid(self) -> int:
        until(lambda: self().pid is not None)
        return self().pid or 0

    def kill(self, number: int = signal.SIGKILL) -> None:
        send_signal(self.pid, number)

    def wait_until_asked(self) -> None:
        """Until a question is made, and on its way."""
        assert self.asked.acquire(timeout=GIVE_UP_S)


@pytest.fixture
def taker(monkeypatch: pytest.MonkeyPatch) -> Takers:
    takers = Takers()
    init, ask = RolloutsApart.__init__, ApartStore.ask

    def made(self: RolloutsApart, *given: Any, **more: Any) -> None:
        init(self, *given, **more)
        takers.made.append(self)

    def asked(self: ApartStore, *given: Any, **more: Any) -> Any:
        takers.asked.release()
        return ask(self, *given, **more)

    monkeypatch.setattr(RolloutsApart, "__init__", made)
    monkeypatch.setattr(ApartStore, "ask", asked)
    return takers


@pytest.fixture
def engine(start: Callable[..., Toy], tmp_path: Path, taker: Takers) -> Callable[..., Toy]:
    """Starts an engine whose rollouts are in a directory, apart."""
    assert not taker.made, "before any"
    return lambda **said: start(**{"rollouts": f"apart:file://{tmp_path}/rollouts"} | said)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RolloutStore]:
    with closing(open_rollouts(f"file://{tmp_path}/rollouts")) as opened:
        yield opened


def compute(toy: Toy, tokens: list[int]) -> None:
    """A request is computed in one step, in the same blocks as any other."""
    stepped(toy, admitted(toy, tokens, BLOCKS), len(tokens))


def end(toy: Toy, tokens: list[int], name: str = "r", *, cut: bool = False) -> Future[dict[str, Any]]:
    """The request in the blocks is done; the scheduler's thread is not held up."""
    ended = toy.scheduler.forget("r")
    of_it = Tokens([*tokens, 7], PROMPT, cut)
    told = toy.scheduler.finished(Key(name, of_client=True), BLOCKS, len(tokens), of_it, ended=ended)
    assert told is not None
    return told


def left(told: Future[dict[str, Any]], store: RolloutStore) -> Routes:
    return routes({"kv_transfer_params": told.result(GIVE_UP_S)}, rollouts=store)


def by_key(tokens: list[int], key: str, store: RolloutStore) -> Routes:
    """The routes of an answer without a handle: its request was aborted."""
    said = {"index": 0, "prompt_token_ids": tokens[:PROMPT], "token_ids": [*tokens[PROMPT:], 7]}
    answer = {"id": "r", "choices": [said], "kv_transfer_params": None}
    return routes(answer, rollouts=store, key=key, wait_s=0)


@pytest.mark.parametrize("late", [False, True])
def test_rows_are_found_by_handle_and_by_key(
    engine: Callable[..., Toy], taker: Takers, store: RolloutStore, late: bool
) -> None:
    """Goal: what a store in the engine's process gives, with the versions. Method: two requests in the same blocks,
    weights that change between them, with which all is forgotten; the engine's process reads no row."""
    toy = engine(late=late, weights_version=1)
    for name, tokens, version in (("a", FIRST, 1), ("b", SECOND, 2)):
        if version > 1:
            toy.scheduler.weights.changed(version)
            toy.scheduler.reset()
        compute(toy, tokens)
        found = left(end(toy, tokens, name), store)
        assert judge(found, tokens) == {"right": 6}
        assert found.weights_versions == ((0, 6, version),)
        assert by_key(tokens, name, store).valid.all()
    assert taker().counters["stored"] == 2
    assert taker().counters["read_here"] == 0


def test_blocks_that_are_given_out_before_the_process_has_read_them(
    engine: Callable[..., Toy], taker: Takers, store: RolloutStore
) -> None:
    """Goal: the engine's process reads what it gives out, and those rows are stored; never the next request's. Method:
    the process is stopped with a question that names the blocks; another request is computed there."""
    toy = engine()
    compute(toy, FIRST)
    taker.kill(signal.SIGSTOP)
    first = end(toy, FIRST, "a")
    taker.wait_until_asked()
    compute(toy, SECOND)
    toy.worker.settle()
    taker.kill(signal.SIGCONT)
    second = end(toy, SECOND, "b")
    assert judge(left(first, store), FIRST) == {"right": 6}
    assert judge(left(second, store), SECOND) == {"right": 6}
    assert taker().counters["read_here"] == 1


def test_rows_that_are_forgotten_before_the_process_has_read_them(
    engine: Callable[..., Toy], taker: Takers, store: RolloutStore
) -> None:
    """Goal: as above, of a reset, which leaves each block its life. Method: the same, by other weights."""
    toy = engine(weights_version=1)
    compute(toy, FIRST)
    taker.kill(signal.SIGSTOP)
    told = end(toy, FIRST)
    taker.wait_until_asked()
    toy.scheduler.weights.changed(2)
    toy.scheduler.reset()
    toy.worker.begin(toy.scheduler.step({}))
    toy.worker.end()
    toy.worker.settle()
    taker.kill(signal.SIGCONT)
    found = left(told, store)
    assert judge(found, FIRST) == {"right": 6}
    assert found.weights_versions == ((0, 6, 1),)


@pytest.mark.parametrize("aborted", [False, True])
def test_a_process_that_is_killed_loses_no_row(
    engine: Callable[..., Toy], taker: Takers, store: RolloutStore, aborted: bool
) -> None:
    """Goal: the next process stores them, and the engine goes on meanwhile. Method: the process is stopped with a
    question and killed; another request is computed before anybody is told."""
    toy = engine()
    compute(toy, FIRST)
    taker.kill(signal.SIGSTOP)
    first = end(toy, FIRST, "a", cut=aborted)
    taker.wait_until_asked()
    taker.kill()
    compute(toy, SECOND)
    second = end(toy, SECOND, "b")
    assert judge(left(first, store), FIRST) == {"right": 6}
    assert judge(left(second, store), SECOND) == {"right": 6}
    assert judge(by_key(FIRST, "a", store), FIRST) == {"right": 6}
    assert (taker().counters["lost_calls"], taker().counters["restarts"]) == (1, 1)


def test_a_process_that_is_killed_amid_its_puts(
    engine: Callable[..., Toy], taker: Takers, store: RolloutStore, tmp_path: Path
) -> None:
    """Goal: what it had put is found under its key when the next process has been asked for the same, though no client
    was told. Method: 30 aborted requests in one question; it is killed when some of them are in the directory."""
    toy = engine()
    compute(toy, FIRST)
    for number in range(99):
        taker.kill(signal.SIGSTOP)
        before = end(toy, FIRST, f"before-{number}")
        taker.wait_until_asked()
        keys = [f"k{number}-{i}" for i in range(30)]
        told = [end(toy, FIRST, key, cut=True) for key in keys]
        taker.kill(signal.SIGCONT)
        assert before.result(GIVE_UP_S)
        until(lambda number=number: any((tmp_path / "rollouts").glob(f"k{number}-*")))
        taker.kill(signal.SIGSTOP)
        amid = len(list((tmp_path / "rollouts").glob(f"k{number}-*.routes"))) in range(1, 30)
        taker.kill(signal.SIGKILL if amid else signal.SIGCONT)
        for each in told:
            assert judge(left(each, store), FIRST) == {"right": 6}
        for key in keys:
            assert judge(by_key(FIRST, key, store), FIRST) == {"right": 6}
        if amid:
            break
    assert taker().counters["lost_calls"] == 1
    assert taker().counters["unstored"] == 0


def test_a_process_that_hangs_is_replaced(
    engine: Callable[..., Toy], taker: Takers, store: RolloutStore, tmp_path: Path
) -> None:
    """Goal: as above. Method: it is stopped, and stays so, for longer than the setting's ``call``."""
    toy = engine(rollouts=f"apart:?call=500ms,file://{tmp_path}/rollouts")
    compute(toy, FIRST)
    before = taker.pid
    taker.kill(signal.SIGSTOP)
    assert judge(left(end(toy, FIRST), store), FIRST) == {"right": 6}
    assert taker.pid != before
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)


def test_what_no_process_stores_is_told(
    engine: Callable[..., Toy], taker: Takers, store: RolloutStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Goal: the answer, a counter and the log say so; nothing of an earlier request is found in its place; later ones
    have their rows. Method: the directory gives way to a file, so that no store opens, and the process is killed."""
    toy = engine(limits={"answer_s": 0.2})
    compute(toy, FIRST)
    assert judge(left(end(toy, FIRST, "a"), store), FIRST) == {"right": 6}
    home, aside = tmp_path / "rollouts", tmp_path / "aside"
    home.rename(aside)
    home.touch()
    compute(toy, FIRST)
    taker.kill(signal.SIGSTOP)
    told = end(toy, FIRST, "a")
    taker.wait_until_asked()
    taker.kill()
    with pytest.raises(RowError, match=r"rows: wanted a process that stores them, got none for 0\.2 s"):
        left(told, store)
    assert taker().counters["unstored"] == 1
    assert "request 'a' has no routes: rows: wanted a process that stores them" in caplog.text
    home.unlink()
    aside.rename(home)
    compute(toy, SECOND)
    until(lambda: taker().pid)
    assert judge(left(end(toy, SECOND, "b"), store), SECOND) == {"right": 6}
    with pytest.raises(RowError, match="no other request has had with this prompt"):
        by_key(FIRST, "a", store)


def test_a_worker_that_stays_behind_costs_its_own_request_alone(
    engine: Callable[..., Toy], taker: Takers, store: RolloutStore
) -> None:
    """Goal: the client is told why, the request counts as unstored, and the next one has its rows. Method: the worker
    is held up for longer than an answer may take."""
    toy = engine(late=True, limits={"answer_s": 0.05})
    go = held(toy)
    compute(toy, FIRST)
    with pytest.raises(RowError, match=r"written by the worker within 0\.05 s, got a worker that is behind"):
        left(end(toy, FIRST, "a"), store)
    assert taker().counters["unstored"] == 1
    go.set()
    compute(toy, SECOND)
    toy.worker.settle()
    assert judge(left(end(toy, SECOND, "b"), store), SECOND) == {"right": 6}


def test_a_store_that_fails_costs_its_own_request_alone(
    engine: Callable[..., Toy], taker: Takers, store: RolloutStore
) -> None:
    """Goal: the client has the store's own words, and the others their rows. Method: four wait for one question; one
    has an id that no rollout can have, one a key that is no text."""
    toy = engine()
    compute(toy, FIRST)
    taker.kill(signal.SIGSTOP)
    before = end(toy, FIRST, "before")
    taker.wait_until_asked()
    told = [end(toy, FIRST, name) for name in ("a", "x" * 999, "b", "\ud800")]
    taker.kill(signal.SIGCONT)
    with pytest.raises(RowError, match="rollout id: wanted at most 200 bytes"):
        left(told[1], store)
    with pytest.raises(RowError, match="UnicodeEncodeError"):
        left(told[3], store)
    for each in (before, told[0], told[2], end(toy, FIRST, "after")):
        assert judge(left(each, store), FIRST) == {"right": 6}
    assert taker().counters["unstored"] == 2


def test_a_request_that_was_preempted(engine: Callable[..., Toy], store: RolloutStore) -> None:
    """Goal: each token has the row that it was sampled with, where each was read by another process. Method: other
    weights come after a preemption; the rows of the first computation lie in spare blocks, those of the second in its
    own."""
    toy, tokens = engine(late=True, weights_version=1), [*FIRST, 2, 8]
    go = held(toy)
    request = admitted(toy, tokens, [5, 2])
    request.all_token_ids, request.num_prompt_tokens = tokens[:7], PROMPT
    stepped(toy, request, 6)
    toy.scheduler.preempted(request)
    toy.weights = 1
    toy.scheduler.weights.changed(2)
    request = admitted(toy, tokens, [5, 2])
    stepped(toy, request, 8)
    go.set()
    told = end(toy, tokens)
    found = left(told, store)
    assert judge(found, tokens, [0] * 6 + [1] * 2) == {"right": 8}
    assert found.weights_versions == ((0, 6, 1), (6, 8, 2))


def test_rows_that_are_missing_everywhere(engine: Callable[..., Toy], taker: Takers, store: RolloutStore) -> None:
    """Goal: they are missing in the rollout, too, and the others are there. Method: a router's ids that are none."""
    toy = engine()
    toy.loses = {1, 2}
    toy.ask("r", FIRST)
    told = toy.scheduler.finished(Key("s"), toy.table, 6, Tokens([*FIRST, 7], PROMPT))
    assert told is not None
    assert judge(left(told, store), FIRST) == {"right": 4, "missing": 2}
    assert taker().counters["read_here"] == 2


def test_a_second_try_puts_nothing_twice(store: RolloutStore) -> None:
    """Goal: routes that a lost process has put are found by key and by the handle of the next one; another request's
    in their place are not taken for them. Method: the same routes are left twice, and then those of other weights."""
    layout_of = routing_spec(EXPERTS, TOP_K, range(2), num_layers=2, block_tokens=TOKENS).attrs
    tokens = Tokens([*FIRST, 7], PROMPT, cut=True)

    def put(weights: int) -> Any:
        ids = [row_of(FIRST[: i + 1], weights) for i in range(6)]
        made = Routes(ids, [True] * 6, layout_of["layer_ids"], EXPERTS, 2)
        return left_values(store, Key("a", of_client=True), made, tokens, (), (), 9, again=True)["rollouts"]

    first = put(0)
    assert put(0) == first
    assert judge(by_key(FIRST, "a", store), FIRST) == {"right": 6}
    assert put(1) != first
    with pytest.raises(RowError, match="no other request has had with this prompt"):
        by_key(FIRST, "a", store)
    assert store.find(rollout_id("a", FIRST[:PROMPT])) is not None


def test_a_block_without_memory_gets_none(tmp_path: Path, taker: Takers, store: RolloutStore) -> None:
    """Goal: the process reads a sparse region as its other readers do. Method: blocks of a page each; a request's are
    given to layers without rows while the process is stopped, so that it reads there when it goes on."""
    spec = routing_spec(EXPERTS, TOP_K, range(128), num_layers=128, block_tokens=16)
    settings = Settings.of({"weights": "m", "rollouts": f"apart:file://{tmp_path}/rollouts"})
    engine = Engine(settings, spec, Namespace("m", 0), 256, 16, shares_blocks=True)
    worker = WorkerRows(engine, {"layers.0": torch.zeros(256, 1, 16, 1)})
    scheduler = SchedulerRows(engine)
    handshake = worker.handshake()
    scheduler.attach(handshake)
    assert handshake.region is not None
    blocks, tokens = list(range(64)), list(range(5)) * 205
    scheduler.given(blocks)
    worker.begin(scheduler.step({"r": 1024}))
    for layer in range(128):
        worker.ids.hook(layer)(torch.tensor([[layer % EXPERTS, (layer + 1) % EXPERTS]] * 1024))
    worker.slots = torch.arange(1024)
    worker.end()
    with_rows = memory_of(handshake.region)
    taker.kill(signal.SIGSTOP)
    told = scheduler.finished(Key("r"), blocks, 1024, Tokens(tokens, PROMPT))
    assert told is not None
    taker.wait_until_asked()
    scheduler.given_elsewhere(blocks)
    worker.begin(scheduler.step({}))
    worker.end()
    without = memory_of(handshake.region)
    assert without < with_rows - 60 * 4096
    taker.kill(signal.SIGCONT)
    assert left(told, store).valid.all()
    assert memory_of(handshake.region) == without
    scheduler.close()
    worker.close()


def memory_of(region: str) -> int:
    """Bytes of memory that a region takes."""
    return 512 * region_path(region).stat().st_blocks


def test_an_engine_that_is_closed_leaves_no_process(engine: Callable[..., Toy], taker: Takers) -> None:
    """Goal: nothing stays behind. Method: its process, when the engine's end has been closed."""
    toy = engine()
    pid = taker.pid
    toy.scheduler.close()
    gone_s = time.monotonic() + GIVE_UP_S
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            break
        assert time.monotonic() < gone_s


@pytest.mark.parametrize(
    ("rollouts", "wanted"),
    [
        ("apart:response:", "rollouts: wanted response: or apart: and the URL of one rollout store"),
        ("apart:apart:file:///a", "rollouts: wanted response: or apart: and the URL of one rollout store"),
        ("apart:file:///a,file:///b", "rollouts: wanted response: or apart: and the URL of one rollout store"),
        ("apart:", "rollouts: wanted response: or apart: and the URL of one rollout store"),
        ("apart:bogus:x", "rollouts: wanted response: or one of file, mooncake, ray, tq, got 'bogus'"),
        ("apart:?arena=1MiB,file:///a", "rollouts: wanted response: or one of call, got 'arena'"),
        ("apart:?call=soon,file:///a", "rollouts: wanted response: or a positive whole number with one of the units"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(rollouts: str, wanted: str) -> None:
    """Goal: the setting is named before anything starts. Method: what is no one store behind ``apart:``."""
    with pytest.raises(ConfigError) as refused:
        Settings.of({"rollouts": rollouts})
    assert wanted in str(refused.value)


def test_another_engine_refuses_it() -> None:
    """Goal: an engine without such a process says so. Method: the settings that all have; and who would read there by
    this URL."""
    with pytest.raises(ConfigError, match="only in vLLM and SGLang one is apart"):
        Common.of({"rollouts": "apart:file:///a"}, "settings")
    with pytest.raises(ConfigError, match="wanted one of file"):
        open_rollouts("apart:file:///a")


def test_a_store_that_cannot_be_opened_stops_the_start(engine: Callable[..., Toy], tmp_path: Path) -> None:
    """Goal: the operator hears of it at the start, as of a store in the engine's process. Method: a file in place of
    the directory."""
    (tmp_path / "rollouts").touch()
    with pytest.raises(KVRouteError, match="rollouts at"):
        engine()
