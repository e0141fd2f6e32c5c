"""vLLM's own field, without vLLM: whose requests get rows, and what the others are told."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvroute import routing_spec
from kvroute.connector.step_rows import Outcome, Piece, StepRows
from kvroute.integrations.vllm import field
from kvroute.integrations.vllm.field import GUARDED, LOST, SESSION, UNGUARDED, Field


class Calls:
    """Calls of vLLM that a guarded front end has wrapped; what they were given."""

    add: Any = staticmethod(bool)
    add_request: Any = lambda _, request: Calls.added.append(request)
    process_outputs: Any = staticmethod(bool)
    make_request_output: Any = staticmethod(bool)
    added: list[Any]

    def __init__(self) -> None:
        self.request_states: dict[str, Any] = {}


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> type[Calls]:
    """The classes and values of vLLM that the field asks for."""
    calls = type("Calls", (Calls,), {})
    Calls.added = []
    for name, values in (
        ("vllm", {}),
        ("vllm.outputs", {"RequestOutput": type("RequestOutput", (Calls,), {})}),
        ("vllm.v1", {}),
        ("vllm.v1.engine", {"FinishReason": SimpleNamespace(ERROR="error")}),
        ("vllm.v1.engine.async_llm", {"AsyncLLM": type("AsyncLLM", (Calls,), {})}),
        ("vllm.v1.engine.output_processor", {"OutputProcessor": calls, "RequestState": type("State", (Calls,), {})}),
    ):
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    field.guard_front_end()
    return calls


def made(*outcomes: Outcome) -> tuple[Field, dict[str, str]]:
    """An engine core's end, whose stream has these rows, and the requests that it has refused, with the reasons."""
    refused: dict[str, str] = {}
    rows: Any = SimpleNamespace(
        engine=SimpleNamespace(
            spec=routing_spec(8, 2, [1, 3], num_layers=4, block_tokens=4), settings=SimpleNamespace(on_missing="tell")
        ),
        stream=SimpleNamespace(refuse=refused.__setitem__, read=lambda *_, **__: (list(outcomes), None)),
        meter=SimpleNamespace(lose_field=lambda _: None),
    )
    return Field(rows, 4), refused


def request(name: str, extra: dict[str, Any] | None, *, resumable: bool = False) -> Any:
    return SimpleNamespace(request_id=name, sampling_params=SimpleNamespace(extra_args=extra), resumable=resumable)


def test_a_guarded_front_end_marks_its_requests_and_no_parameters_of_its_client(vllm: type[Calls]) -> None:
    """Goal: the engine core knows who reads its rows. Method: requests of one client's parameters, with arguments of
    their own and without; one that samples nothing."""
    processor, added = vllm(), Calls.added
    parameters = SimpleNamespace(extra_args={"kv_transfer_params": {"kvroute": {"key": "k"}}})
    for name, sampling in (("a", parameters), ("b", SimpleNamespace(extra_args=None)), ("pooled", None)):
        processor.add_request(SimpleNamespace(request_id=name, sampling_params=sampling))
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
def test_what_a_front_end_is_told(why: str, vllm: type[Calls]) -> None:
    """Goal: a front end that would say nothing of a missing row fails, by either value of ``on_missing``; another one
    is told. Method: an output that goes on."""
    assert vllm, "which has the reason of an end"
    piece = Piece("a", 0, 40)
    own, _ = made(Outcome(piece, None, [(0, 40, why)]))
    output = SimpleNamespace(
        request_id="a", new_token_ids=[7], new_logprobs=None, finish_reason=None, kv_transfer_params=None
    )
    own.fill([[output]], StepRows([piece], None, 0.0), apart=True)
    if why == UNGUARDED:
        assert (output.finish_reason, output.new_token_ids, list(own.failed)) == ("error", [], ["a"])
        assert output.kv_transfer_params is None
    else:
        assert (output.finish_reason, output.new_token_ids, list(own.failed)) == (None, [7], [])
        assert output.kv_transfer_params == {LOST: {"gaps": [[0, 40, SESSION]], "fails": False}}
