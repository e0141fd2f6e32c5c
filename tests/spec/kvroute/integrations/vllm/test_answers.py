"""The client of the vLLM integration, without vLLM: objects and JSON, handles and stores."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from waiting import GIVE_UP_S, until

import kvroute
from kvroute.connector import Key, Limits, Tokens
from kvroute.connector.fields import Options, options_of
from kvroute.connector.key import rollout_id
from kvroute.connector.left import LeftRoutes
from kvroute.integrations.vllm import choice_key, gathered, routes, unseen
from kvroute.rollout import RolloutHandle, RolloutStore, open_rollouts

PROMPT, ANSWER = [5, 6, 7], [8, 9, 10, 11]
TOKENS, OTHER = [*PROMPT, *ANSWER], [1, 2, 3]


def made(rows: int, seed: int = 0) -> kvroute.Routes:
    """Routes of ``rows`` tokens, different for each seed."""
    ids = np.argsort(np.random.default_rng(seed).random((rows, 2, 4)), axis=-1)[:, :, :2]
    return kvroute.Routes(ids, np.ones(rows, np.bool_), layer_ids=(0, 1), num_experts=4, num_layers=2)


def left(
    store: RolloutStore | None,
    key: str,
    tokens: list[int],
    seed: int = 0,
    *,
    cut: bool = False,
    prompt: int = len(PROMPT),
) -> Any:
    """An engine has left the routes of these tokens, the last of which was sampled only; returns the engine's message
    to the client."""
    return LeftRoutes(store).leave(Key(key, True), made(len(tokens) - 1, seed), Tokens(tokens, prompt, cut), ())


def sibling(choice: int, group: str) -> Key:
    """The key of one of several completions."""
    return Key(f"{choice}_{group}", False, choice, group)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RolloutStore]:
    with closing(open_rollouts(f"file://{tmp_path}")) as opened:
        yield opened


def answered(request: str = "r", *choices: tuple[list[int], list[int]], **more: Any) -> dict[str, Any]:
    """The answer of an OpenAI server to these prompts and with these tokens."""
    said = [
        {"index": i, "prompt_token_ids": prompt, "token_ids": tokens}
        for i, (prompt, tokens) in enumerate(choices or [(PROMPT, ANSWER)])
    ]
    return {"id": request, "choices": said, "kv_transfer_params": None, **more}


# What comes with an answer ------------------------------------------------------------------------------------------


def test_a_response_brings_its_routes() -> None:
    """Goal: bound to the prompt and to the tokens that have rows, not to the last one. Method: an object and JSON."""
    told = left(None, "r", TOKENS)
    assert set(told["kvroute"]) == {"routes"}
    output = SimpleNamespace(
        request_id="r",
        prompt_token_ids=PROMPT,
        outputs=[SimpleNamespace(index=0, token_ids=ANSWER)],
        kv_transfer_params=told,
    )
    answer = answered(kv_transfer_params=told)
    assert routes(output) == routes(answer) == made(6).bind(TOKENS, [3, 6])
    assert routes({"kv_transfer_params": told}) == made(6).bind(TOKENS, [3, 6])  # as the engine has bound them
    with pytest.raises(kvroute.RowError, match=r"index: wanted one of \[0\]"):
        routes(output, index=1)


def test_a_handle_of_other_tokens_is_refused(store: RolloutStore) -> None:
    """Goal: a handle proves nothing about the tokens that came with it. Method: one token is changed; one is missing;
    routes that an engine bound to no tokens."""
    told = left(store, "r", TOKENS)
    for tokens, why in (([8, 9, 1, 11], "the hash of the first 6 differs"), (ANSWER[:2], "to be the first 4")):
        with pytest.raises(kvroute.RowError, match=why):
            routes(answered("r", (PROMPT, tokens), kv_transfer_params=told), rollouts=store)
    told = LeftRoutes(store).leave(Key("r"), made(6), None, ())
    assert routes({"kv_transfer_params": told}, rollouts=store) == made(6)
    with pytest.raises(kvroute.RowError, match="to be the first 6"):
        routes(answered(kv_transfer_params=told), rollouts=store)


def test_a_handle_wants_its_store(store: RolloutStore) -> None:
    """Goal: an answer whose routes cannot be read gives the reason. Method: no store; a rollout that is gone."""
    told = left(store, "r", TOKENS)
    with pytest.raises(kvroute.RowError, match="kind file"):
        routes(answered(kv_transfer_params=told))
    store.delete(RolloutHandle.from_json(told["kvroute"]["rollouts"]["0"]))
    with pytest.raises(kvroute.RowError, match="there and sound"):
        routes(answered(kv_transfer_params=told), rollouts=store)


def test_an_error_in_the_answer_ends_the_search(store: RolloutStore) -> None:
    """Goal: the engine's own error is reported at once. Method: errors of this request, of all and of a sibling; the
    store has a rollout of these tokens, of an earlier request."""
    left(store, "r", TOKENS)
    ours = LeftRoutes(store).fail(Key("r"), kvroute.RowError("rows", "a", "b"))
    for told in (ours, {"kvroute": {"error": "rows: wanted a, got b"}}):
        with pytest.raises(kvroute.RowError, match="got rows: wanted a, got b"):
            routes(answered(kv_transfer_params=told), rollouts=store, key="r", wait_s=60)
    siblings = LeftRoutes(store)
    siblings.fail(sibling(0, "group"), kvroute.RowError("rows", "a", "b"))
    told = siblings.leave(sibling(1, "group"), made(6), Tokens(TOKENS, 3), [[0, 2]])
    both = answered("r", (PROMPT, ANSWER), (PROMPT, ANSWER), kv_transfer_params=told)
    assert len(routes(both, 1, rollouts=store)) == 6
    assert unseen(both, 1) == ((0, 2),)
    assert unseen(both, 0) == ()
    with pytest.raises(kvroute.RowError, match="got rows: wanted a, got b"):
        routes(both, 0, rollouts=store, key="r", wait_s=60)


@pytest.mark.parametrize(
    ("broken", "field"),
    [
        ({"choices": 5}, "answer"),
        ({"choices": [None, 3]}, "index"),
        ({"choices": [{"index": [0], "token_ids": ANSWER}]}, "answer"),
        ({"choices": [{"index": 0, "prompt_token_ids": 7, "token_ids": ANSWER}]}, "answer"),
        ({"choices": [{"index": 0, "prompt_token_ids": PROMPT, "token_ids": [8, [9], 10, 11]}]}, "tokens"),
        ({"choices": [{"index": 0, "prompt_token_ids": PROMPT, "token_ids": "8910"}]}, "tokens"),
    ],
)
def test_an_answer_of_another_form_is_refused(store: RolloutStore, broken: dict[str, Any], field: str) -> None:
    """Goal: a client catches one kind of error. Method: parts of an answer whose routes are there have other types."""
    told = left(store, "r", TOKENS)
    with pytest.raises(kvroute.RowError, match=f"^{field}: wanted"):
        routes(answered(kv_transfer_params=told) | broken, rollouts=store, wait_s=0)
    with pytest.raises(kvroute.RowError, match="answer: wanted"):
        unseen(answered(kv_transfer_params={"kvroute": {"unseen": {"0": [[1]]}}}))
    with pytest.raises(kvroute.RowError, match="stream: wanted"):
        gathered([answered() | {"object": "text_completion", "choices": [{"index": {}, "token_ids": [1]}]}])


def test_completions_that_are_all_done_are_not_kept() -> None:
    """Goal: the scheduler's memory does not grow with the answers that have gone out, and no answer of several lacks
    one's routes. Method: requests with two completions; of one, the second is under way until the end; of another, the
    second begins when the first is done; of a third, the second ends without an answer."""
    tokens = Tokens(TOKENS, 3)
    values = LeftRoutes().leave(sibling(0, "a"), made(6), tokens, ())["kvroute"]["routes"]
    engine = LeftRoutes(limits=Limits(idle_nbytes_max=9 * len(values["0"]["record"]) // 2))

    def says(choice: int, group: str) -> Any:
        return engine.leave(sibling(choice, group), made(6), tokens, ())["kvroute"]["routes"]

    for choice, group in ((0, "slow"), (1, "slow"), (0, "gone"), (1, "gone")):
        engine.begins(sibling(choice, group))
    says(0, "slow")
    says(0, "gone")
    for i in range(20):
        for choice in (0, 1):
            engine.begins(sibling(choice, f"r{i}"))
            told = says(choice, f"r{i}")
        assert sorted(told) == ["0", "1"]
    engine.unanswered(sibling(1, "gone"))
    assert sorted(says(2, "r19")) == ["0", "1", "2"]
    assert sorted(says(0, "r20")) == ["0"]
    assert [sorted(says(2, name)) for name in ("r18", "gone", "r17")] == [["2"]] * 3, "they are forgotten"
    assert sorted(says(1, "slow")) == ["0", "1"]


# Routes found by a key ------------------------------------------------------------------------------------------------


def test_routes_that_were_left_are_waited_for(store: RolloutStore) -> None:
    """Goal: routes are found though the engine stores them after its front end has answered. Method: they come late,
    behind those of an earlier request with the same key and prompt, which are read once."""
    left(store, "k", [*PROMPT, 2, 2], seed=1)
    answer = answered("cmpl-1", (PROMPT, ANSWER), (PROMPT, ANSWER))
    earlier = store.find(rollout_id("k", PROMPT))
    assert earlier is not None

    def put() -> None:
        until(lambda: store.counters.hits)  # the earlier one has been read, and is not the request's
        store.delete(earlier)
        left(store, "k", TOKENS)

    putting = threading.Thread(target=put, daemon=True)
    putting.start()
    try:
        assert routes(answer, 1, rollouts=store, key="k", wait_s=60) == made(6).bind(TOKENS, [3, 6])
    finally:
        putting.join(GIVE_UP_S)
    assert store.counters.hits == 2
    with pytest.raises(kvroute.RowError, match=r"completion 0 of cmpl-1: .*under the key z .*nor one in the store"):
        routes(answer, 0, rollouts=store, key="z", wait_s=0)
    with pytest.raises(kvroute.RowError, match="key=, the one that its request carried"):
        routes(answer, 0, rollouts=store, wait_s=60)
    with pytest.raises(kvroute.RowError, match="rollouts="):
        routes(answer, 0, key="k")


@pytest.mark.parametrize("tokens", [[40, 41, 42, 43, 50, 51, 52, 53], [*PROMPT, 8, 9, 1, 1, 1], [*PROMPT, 8, 9]])
def test_what_another_request_of_the_key_has_left_is_not_handed_out(store: RolloutStore, tokens: list[int]) -> None:
    """Goal: a retry or a restart gets no rows of another request. Method: other prompt; the same prompt, sampled
    otherwise; fewer tokens of the same sequence."""
    left(store, "k", tokens, cut=True)
    with pytest.raises(kvroute.RowError, match=r"got rows of |nor one in the store"):
        routes(answered(), rollouts=store, key="k", wait_s=0)


@pytest.mark.parametrize("more", [0, 1, 3, 900])
def test_a_cut_answer_has_the_rows_of_its_own_tokens(store: RolloutStore, more: int) -> None:
    """Goal: routes are found though the engine computed further tokens before it heard that the front end had ended the
    request. Method: some tokens more; the answer cut anywhere; one of its tokens changed."""
    rest = [t % 97 for t in range(more)]
    left(store, "k", [*TOKENS, *rest], cut=True)
    for n in range(1, len(ANSWER) + 1):
        found = routes(answered("r", (PROMPT, ANSWER[:n])), rollouts=store, key="k", wait_s=0)
        assert found == made(6 + more).slice(0, 2 + n).bind(TOKENS, [3, 2 + n])
        found.validate([*PROMPT, *ANSWER[:n]], rows=2 + n)
    with pytest.raises(kvroute.RowError, match="the hash of the first 5 differs"):
        routes(answered("r", (PROMPT, [8, 1, 10, 11])), rollouts=store, key="k", wait_s=0)


def test_without_token_ids_nothing_is_found_by_a_key(store: RolloutStore) -> None:
    """Goal: a key alone proves nothing. Method: an answer without token ids, or without a prompt's."""
    left(store, "k", TOKENS)
    for answer in ({"id": "r", "choices": [{"index": 0}]}, {"id": "r", "choices": [{"index": 0, "token_ids": ANSWER}]}):
        with pytest.raises(kvroute.RowError, match="return_token_ids"):
            routes(answer, rollouts=store, key="k", wait_s=60)
    assert len(routes(answered(""), rollouts=store, key="k", wait_s=0)) == 6  # an id is not needed


def test_a_client_may_keep_some_choices(store: RolloutStore) -> None:
    """Goal: the key says which completion is meant. Method: two of one prompt; an answer with one choice left."""
    for i in (0, 1):
        left(store, f"k~{i}", [*PROMPT, 20 + i, 30], seed=i)
    answer = answered("cmpl-x", (PROMPT, [20, 30]), (PROMPT, [21, 30]))
    kept = {**answer, "choices": answer["choices"][1:]}
    assert routes(kept, 1, rollouts=store, key="k~1", wait_s=0) == made(4, 1).bind([*PROMPT, 21, 30], [3, 4])
    with pytest.raises(kvroute.RowError, match=r"index: wanted one of \[1\]"):
        routes(kept, 0, rollouts=store, key="k~0", wait_s=0)


def test_handles_of_one_prompt_say_nothing_of_another() -> None:
    """Goal: of a connector's messages vLLM sends only that of the first prompt. Method: its handles; the error of the
    second."""
    both = LeftRoutes()
    both.leave(sibling(0, "group"), made(4, 0), Tokens([*PROMPT, 20, 30], 3), ())
    told = both.leave(sibling(1, "group"), made(4, 1), Tokens([*PROMPT, 21, 30], 3), ())
    said = [(PROMPT, [20, 30]), (PROMPT, [21, 30]), (OTHER, [20, 31]), (OTHER, [21, 31])]
    answer = answered("cmpl-x", *said, kv_transfer_params=told)
    assert [routes(answer, i) for i in (0, 1)] == [made(4, i).bind([*PROMPT, 20 + i], [3, 4]) for i in (0, 1)]
    with pytest.raises(kvroute.RowError, match=r"completion 2 of cmpl-x: .* rollouts=.* those of completions \['0'"):
        routes(answer, 2)


@pytest.mark.parametrize("name", ["5_1", "12_7_0", "2026_step", "0_1", "7_abc-12345678", "error", "a_b"])
def test_ids_that_look_like_a_child_s_are_the_client_s(name: str) -> None:
    """Goal: the number of a client's own id is no choice of an answer, and another choice's rows are not taken. Method:
    a client's ids with a handle; with one of other tokens."""
    output = {"request_id": name, "prompt_token_ids": PROMPT, "outputs": [{"index": 0, "token_ids": ANSWER}]}
    told = LeftRoutes().leave(Key.of(f"{name}-12345678"), made(6), Tokens(TOKENS, 3), ())
    other = LeftRoutes().leave(Key.of(f"{name}-12345678"), made(6), Tokens([*TOKENS[:5], 1, 1], 3), ())
    assert len(routes({**output, "kv_transfer_params": told})) == 6
    with pytest.raises(kvroute.RowError, match="other tokens"):
        routes({**output, "kv_transfer_params": other})


def test_a_response_of_the_other_api_is_bound_where_it_says_its_tokens(store: RolloutStore) -> None:
    """Goal: ``/v1/responses`` binds routes or gives the reason why not. Method: with a handle, with and without
    messages; without one, for the API takes no key."""
    told = left(store, "resp_1_0", TOKENS)
    plain = {"id": "resp_1", "object": "response", "kv_transfer_params": told, "output": []}
    assert routes(plain, rollouts=store) == made(6).bind(TOKENS, [3, 6])
    messages = {"input_messages": [{"tokens": PROMPT}], "output_messages": [{"tokens": ANSWER}]}
    assert routes({**plain, **messages}, rollouts=store) == routes(plain, rollouts=store)
    with pytest.raises(kvroute.RowError, match="other tokens"):
        routes({**plain, **messages, "output_messages": [{"tokens": [1, *ANSWER]}]}, rollouts=store)
    with pytest.raises(kvroute.RowError, match="enable_response_messages"):
        routes({**plain, "kv_transfer_params": None}, rollouts=store, wait_s=60)
    with pytest.raises(kvroute.RowError, match=r"the response of response\.completed"):
        routes({"type": "response.completed", "response": plain}, rollouts=store)


# Streams ------------------------------------------------------------------------------------------------------------


def chunk(index: int, tokens: list[int] | None, kind: str = "text_completion", **more: Any) -> dict[str, Any]:
    """A chunk of a stream, as vLLM sends it: unset fields are absent."""
    return {"id": "cmpl-x", "object": kind, "choices": [{"index": index, "text": "", "token_ids": tokens}], **more}


COMPLETIONS = [
    {**chunk(1, [8]), "choices": [{"index": 1, "prompt_token_ids": PROMPT, "token_ids": [8]}]},
    {**chunk(0, [9]), "choices": [{"index": 0, "prompt_token_ids": PROMPT, "token_ids": [9]}]},
    chunk(0, [10, 11]),
    {**chunk(1, [12]), "choices": [{"index": 1, "token_ids": [12], "finish_reason": "stop", "stop_reason": "x"}]},
    {"id": "cmpl-x", "object": "text_completion", "choices": [], "usage": {"completion_tokens": 5}},
]
CHAT = [
    {**chunk(0, None, "chat.completion.chunk"), "prompt_token_ids": PROMPT},
    chunk(1, None, "chat.completion.chunk"),
    chunk(1, [8], "chat.completion.chunk"),
    chunk(0, [9, 10, 11], "chat.completion.chunk"),
    chunk(1, [12], "chat.completion.chunk"),
]


@pytest.mark.parametrize("chunks", [COMPLETIONS, CHAT])
def test_a_stream_is_gathered(store: RolloutStore, chunks: list[dict[str, Any]]) -> None:
    """Goal: each choice of a stream has its routes. Method: chunks of two choices in turn, with a chunk of usage."""
    said = [[9, 10, 11], [8, 12]]
    for i, tokens in enumerate(said):
        left(store, choice_key("k", i), [*PROMPT, *tokens], seed=i)
    answer = gathered(iter(chunks))
    for i, tokens in enumerate(said):
        assert answer["choices"][i]["token_ids"] == tokens
        rows = 2 + len(tokens)
        found = routes(answer, i, rollouts=store, key=choice_key("k", i), wait_s=0)
        assert found == made(rows, i).bind([*PROMPT, *tokens], [3, rows])
    for each in chunks:
        with pytest.raises(kvroute.RowError, match=r"gathered\(chunks\)"):
            routes(each, rollouts=store, wait_s=0)
    with pytest.raises(kvroute.RowError, match=r"gathered\(chunks\)"):  # of a stream whose every chunk has its usage
        routes({**chunks[3], "usage": {"completion_tokens": 5}}, chunks[3]["choices"][0]["index"], rollouts=store)
    with pytest.raises(kvroute.RowError, match="rollouts="):
        routes(answer)


def test_an_error_in_place_of_an_answer_is_told() -> None:
    """Goal: a client gets the server's error. Method: vLLM's two forms of an error's body."""
    body = {"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "code": 500}}
    for error in (body, {"error": "EngineCore encountered an issue."}):
        with pytest.raises(kvroute.RowError, match="got the server's error: EngineCore encountered an issue"):
            routes(error)


def test_chunks_that_are_not_one_stream_are_refused() -> None:
    """Goal: an answer gathered from a stream is whole. Method: nothing, another answer's chunk, no token ids, an
    error."""
    other = {**COMPLETIONS[2], "id": "cmpl-y"}
    bare = {"id": "cmpl-x", "object": "text_completion", "choices": [{"index": 0, "text": "a"}]}
    for chunks, why in (
        ([], "no choice in any"),
        (COMPLETIONS[-1:], "no choice in any"),
        ([*COMPLETIONS, other], "chunk.id: wanted cmpl-x, got cmpl-y"),
        ([bare], "return_token_ids"),
        (COMPLETIONS[2:3], "return_token_ids"),
        ([*COMPLETIONS, {"error": {"message": "the engine died"}}], "the engine died"),
        ([answered()], "chunk.object"),
    ):
        with pytest.raises(kvroute.RowError, match=why):
            gathered(chunks)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (7, "kvroute: wanted a mapping with start or key, got 7"),
        ([], r"kvroute: wanted a mapping with start or key, got \[\]"),
        ({"strat": 1}, "kvroute: wanted a mapping with start or key, got the key 'strat'"),
        ({"start": 1, 2: 3}, "kvroute: wanted a mapping with start or key, got the key 2"),
        *(({"key": key}, r"kvroute\.key: wanted 1 to 128 .*, got ") for key in ("", "x" * 129, "a b", "a~1", "a@b")),
        *(({"key": key}, r"kvroute\.key: wanted 1 to 128 .*, got ") for key in (7, None, True, ["a"], b"a", "é", "\n")),
    ],
)
def test_a_request_that_asks_for_what_there_is_not_is_refused(asked: Any, why: str) -> None:
    """Goal: a misspelt option is an error in the answer. Method: other values than a mapping, other names in it, and
    keys of other types, lengths and characters, among them what a choice's key and a rollout's id have."""
    with pytest.raises(kvroute.RowError, match=why):
        options_of(asked)


def test_what_goes_on_from_prefill_is_a_request() -> None:
    """Goal: a proxy hands prefill's answer over as it is. Method: each name that such an answer may have."""
    assert options_of(None) == Options()
    assert options_of({"transfer": {}, "error": {}, "rollouts": {}, "unseen": {}, "missing": {}}) == Options()
    assert options_of({"start": "3"}) == Options("3")  # judged where the prompt is known
    assert options_of({"transfer": {}, "key": "k", "start": 3}) == Options(3, "k")


@pytest.mark.parametrize(("reason", "said"), [("abort", True), ("error", True), ("stop", False)])
def test_an_answer_without_a_handle_says_why(reason: str, said: bool) -> None:
    """Goal: a client learns why there are no routes. Method: requests that ended in each way, without a store."""
    answer = answered()
    answer["choices"][0]["finish_reason"] = reason
    with pytest.raises(kvroute.RowError, match="their handle") as refused:
        routes(answer)
    assert (f"the request ended as {reason!r}" in str(refused.value)) == said


@pytest.mark.parametrize("output", [{"sequences": []}, SimpleNamespace(tokens=[1], cum_logprob=-1.0)])
def test_a_beam_has_no_routes(output: Any) -> None:
    """Goal: as above. Method: a beam search's answer, and one of its beams."""
    with pytest.raises(kvroute.RowError, match="got one of a beam search"):
        routes(output)
