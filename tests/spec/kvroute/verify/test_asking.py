"""Whatever a server answers: it is read, or is an error with a name, and what was read can be judged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pybase64
import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st
from row_server import EXPERTS, Engine, none, serving

import kvroute
from cache_manager.errors import RowError
from kvroute.routes import Routes
from kvroute.verify.asking import Question, Reply, Server, ServerError, rows_of
from kvroute.verify.judging import judge

LAYERS, TOP_K = 3, 4  # of the engine's model
SPEC = kvroute.routing_spec(EXPERTS, TOP_K, range(LAYERS), LAYERS, block_tokens=1)
QUESTION = Question("any", tuple(range(3, 12)), n=2)
ODD: list[Any] = [None, -1, 0, True, 1.5, 1 << 31, 1 << 63, 1 << 70, "", "x", "A" * 8, [], {}, [1], [-1], [None], ["x"]]
ODD += [[[1]], {"0": 1}, {"kvroute": {"routes": {}}}]


def own_routes(tokens: list[int], *, top_k: int, experts: int) -> Any:
    """What kvroute says in an answer."""
    ids = np.tile(np.arange(top_k), (len(tokens) - 1, LAYERS, 1))
    routes = Routes(ids, np.ones(len(ids), np.bool_), tuple(range(LAYERS)), experts, LAYERS)
    return routes.bind(tokens, [len(QUESTION.prompt), len(tokens) - 1]).to_json()


@pytest.fixture(scope="module")
def asked() -> list[tuple[Server, Any]]:
    """Servers, and sound answers of theirs: with the engine's own field, with kvroute's routes, with those of other
    models."""
    pairs = []
    for kind in ("vllm", "sglang"):
        with serving(Engine(kind, none)) as url:
            server = Server(url, SPEC, None, 4, 0)
            reply = server.reply(QUESTION)
        assert isinstance(reply, Reply)
        answer = json.loads(reply.content)
        pairs.append((server, answer))
        new = answer["choices"][0]["token_ids"] if kind == "vllm" else answer[0]["output_ids"]
        for top_k, experts in ((TOP_K, EXPERTS), (TOP_K + 1, EXPERTS), (TOP_K, 2 * EXPERTS)):
            routes = own_routes([*QUESTION.prompt, *new], top_k=top_k, experts=experts)
            with_ours = json.loads(reply.content)
            entries = {"routes": {"0": routes}, "missing": {"0": [[0, 2, "late: x"]]}, "rollouts": {"1": "{}"}}
            if kind == "vllm":
                with_ours["kv_transfer_params"] = {"kvroute": entries}
            else:
                with_ours[0]["meta_info"]["kvroute"] = [entries]
            pairs.append((server, with_ours))
    return pairs


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


def replaced(value: Any, path: tuple[Any, ...], by: Any) -> Any:
    if not path:
        return by
    changed = value.copy()
    changed[path[0]] = replaced(value[path[0]], path[1:], by)
    return changed


def read(server: Server, answer: Any) -> Any:
    return server.answers(QUESTION, Reply(json.dumps(answer).encode(), 0.1))


@examples(300)
@given(st.data())
def test_an_answer_is_read_and_judged_or_is_an_error(asked: list[tuple[Server, Any]], data: st.DataObject) -> None:
    """Goal: one strange answer does not end the judgement of all others. Method: sound answers in which parts are of
    another kind; each is judged twice, as prompts are asked again."""
    server, answer = data.draw(st.sampled_from(asked))
    for _ in range(data.draw(st.integers(0, 3))):
        path = data.draw(st.sampled_from(sorted(places(answer), key=repr)))
        answer = replaced(answer, path, data.draw(st.sampled_from(ODD)))
    answers = read(server, answer)
    if not isinstance(answers, ServerError):
        findings = judge([*answers, *answers], SPEC, None)
        assert sum(count.total() for count in findings.rows.values()) == 2 * sum(len(each.ids) for each in answers)


def test_rows_of_another_model_are_refused(asked: list[tuple[Server, Any]]) -> None:
    """Goal: no row is judged as one of the model that was named. Method: kvroute's routes of more experts, or more of
    them for each token; arrays of a wider row, which could be cut into rows of the model's."""
    for number, (server, answer) in enumerate(asked):
        first, *_ = read(server, answer)
        is_other = number % 4 >= 2
        assert ("as the model has" in first.refused) == is_other, (number, first.refused)
        assert bool(first.known.any()) != is_other, (number, first.refused)
    wide = np.zeros((6, LAYERS, 2 * TOP_K), "<u1")
    with pytest.raises(RowError, match=r"integers of 6 rows, 3 layers, top 4, got uint8 of shape \(6, 3, 8\)"):
        rows_of(npy(wide), SPEC, 6)


@pytest.mark.parametrize("tokens", [[-1], [1 << 31], [1.5], ["5"], [None], 5, "5", {"0": 5}])
def test_what_is_no_token_is_named(asked: list[tuple[Server, Any]], tokens: Any) -> None:
    for server, answer in asked:
        path = (0, "output_ids") if isinstance(answer, list) else ("choices", 0, "token_ids")
        error = read(server, replaced(answer, path, tokens))
        assert isinstance(error, ServerError)
        assert "answer token ids: wanted integers from 0 to 2147483647" in str(error)


def npy(array: np.ndarray) -> str:
    text = f"{{'descr': '{array.dtype.str}', 'fortran_order': False, 'shape': {array.shape}, }}".encode()
    header = text.ljust(117) + b"\n"
    return pybase64.b64encode_as_string(
        b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + array.tobytes()
    )
