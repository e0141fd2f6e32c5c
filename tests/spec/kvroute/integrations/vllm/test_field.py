"""vLLM's own field, without vLLM: whose requests get rows, and what the others are told."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from kvroute.integrations.vllm import field
from kvroute.integrations.vllm.field import GUARDED, LOST, SESSION, UNGUARDED, Field


def made() -> tuple[Field, dict[str, str]]:
    """An engine core's end, and the requests that it has refused, with the reasons."""
    own = object.__new__(Field)
    refused: dict[str, str] = {}
    own.stream = SimpleNamespace(refuse=refused.__setitem__)  # type: ignore[assignment]
    own.rows = SimpleNamespace(meter=SimpleNamespace(lose_field=lambda _: None))  # type: ignore[assignment]
    own.failed, own._fails = deque(), False
    return own, refused


def request(name: str, extra: dict[str, Any] | None, *, resumable: bool = False) -> Any:
    return SimpleNamespace(request_id=name, sampling_params=SimpleNamespace(extra_args=extra), resumable=resumable)


def test_a_guarded_front_end_marks_its_requests_and_no_parameters_of_its_client() -> None:
    """Goal: the engine core knows who reads its rows. Method: requests of one client's parameters, with arguments of
    their own and without; one that samples nothing."""
    added: list[Any] = []
    add = field._adding(lambda _, request: added.append(request))
    processor = SimpleNamespace(request_states={})
    parameters = SimpleNamespace(extra_args={"kv_transfer_params": {"kvroute": {"key": "k"}}})
    for name, sampling in (("a", parameters), ("b", SimpleNamespace(extra_args=None)), ("pooled", None)):
        add(processor, SimpleNamespace(request_id=name, sampling_params=sampling))
    assert parameters.extra_args == {"kv_transfer_params": {"kvroute": {"key": "k"}}}
    assert added[0].sampling_params.extra_args == {**parameters.extra_args, GUARDED: True}
    assert added[1].sampling_params.extra_args == {GUARDED: True}
    assert added[2].sampling_params is None
    own, refused = made()
    for one in added:
        one.resumable = False
        own.begins(one)
    assert refused == {}


def test_rows_go_to_front_ends_that_read_them() -> None:
    """Goal: no front end puts a shorter array together, or one of other tokens. Method: requests without the mark, and
    one of a session."""
    own, refused = made()
    own.begins(request("plain", None))
    own.begins(request("other", {"kv_transfer_params": {}}))
    own.begins(request("session", {GUARDED: True}, resumable=True))
    own.begins(request("guarded", {GUARDED: True}))
    assert refused == {"plain": UNGUARDED, "other": UNGUARDED, "session": SESSION}


@pytest.mark.parametrize("why", [UNGUARDED, SESSION])
def test_what_a_front_end_is_told(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a front end that would say nothing of a missing row fails, by either value of ``on_missing``; another one
    is told. Method: an output that goes on."""
    monkeypatch.setattr(field, "_error", lambda: "error")
    own, _ = made()
    output = SimpleNamespace(
        request_id="a", new_token_ids=[7], new_logprobs=None, finish_reason=None, kv_transfer_params=None
    )
    own._lose(output, [(0, 40, why)])
    if why == UNGUARDED:
        assert (output.finish_reason, output.new_token_ids, list(own.failed)) == ("error", [], ["a"])
        assert output.kv_transfer_params is None
    else:
        assert (output.finish_reason, output.new_token_ids, list(own.failed)) == (None, [7], [])
        assert output.kv_transfer_params == {LOST: {"gaps": [[0, 40, SESSION]], "fails": False}}
