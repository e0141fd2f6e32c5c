"""Requests of the small engine that end or lose their blocks, and what their clients get."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from toy_engine import Asked, Toy, admitted, stepped
from waiting import GIVE_UP_S

from kvroute.connector import Key, Tokens, routes
from kvroute.rollout import RolloutStore
from kvroute.routes import Routes

FIRST, SECOND = [3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8]
BLOCKS = [5, 2]


def compute(toy: Toy, tokens: list[int]) -> None:
    """A request is computed in one step, in the same blocks as any other."""
    stepped(toy, admitted(toy, tokens, BLOCKS), len(tokens))


def end(toy: Toy, tokens: list[int], name: str = "r") -> Future[dict[str, Any]]:
    """The request in the blocks is done; the scheduler's thread is not held up."""
    ended = toy.scheduler.forget("r")
    told = toy.scheduler.finished(Key(name, True), BLOCKS, len(tokens), Tokens(tokens, len(tokens)), ended=ended)
    assert told is not None
    return told


def of(told: Future[dict[str, Any]], store: RolloutStore | None = None) -> Routes:
    return routes({"kv_transfer_params": told.result(GIVE_UP_S)}, rollouts=store)


SAID = [*FIRST, 7, 2, 8]
"""A prompt of four tokens and an answer of five."""


def preempted(toy: Toy, read: int) -> Asked:
    """The engine has computed a number of tokens of a request, sampled one more, and takes its blocks away."""
    request = admitted(toy, SAID, [5, 2, 3])
    request.all_token_ids, request.num_prompt_tokens = SAID[: read + 1], 4
    stepped(toy, request, read)
    toy.scheduler.preempted(request)
    return request


def again(toy: Toy, blocks: list[int]) -> Routes:
    """It is computed from its first token, in other blocks, to its end."""
    request = admitted(toy, SAID, blocks)
    stepped(toy, request, len(SAID))
    ended = toy.scheduler.forget("r")
    told = toy.scheduler.finished(Key("r"), blocks, len(SAID), Tokens([*SAID, 5], 4), ended=ended)
    assert told is not None
    return of(told)
