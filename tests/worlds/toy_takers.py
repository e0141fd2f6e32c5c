"""The small engine whose rollouts a process of its own stores, and that process, which is watched and killed."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import Future
from typing import Any

import pytest
from standing_still import send_signal
from toy_engine import Toy, admitted, stepped
from waiting import GIVE_UP_S, until

from cache_manager.storage.apart import ApartStore
from kvroute.connector import Key, Tokens, routes
from kvroute.connector.rollouts_apart import RolloutsApart
from kvroute.rollout import RolloutStore
from kvroute.routes import Routes

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


def watched(monkeypatch: pytest.MonkeyPatch) -> Takers:
    """The takers that are started until the test is over."""
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
