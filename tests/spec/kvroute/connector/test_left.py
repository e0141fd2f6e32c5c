"""Rollouts that a scheduler leaves for clients: bound to the request's tokens, under a key that its client never uses
again; if it does, nobody gets another request's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from toy_engine import Toy, admitted, judge
from toy_requests import EXPERTS, row_of
from waiting import GIVE_UP_S

import kvroute
from kvroute.connector import Key, Tokens, choice_key, routes
from kvroute.connector.key import rollout_id
from kvroute.connector.left import left_values
from kvroute.rollout import RolloutStore, open_rollouts
from kvroute.rollout.local import LocalRollouts
from kvroute.routes import Routes

TOKENS = [3, 1, 4, 1, 5, 9]
PROMPT = 3
WAIT_S = min(60.0, GIVE_UP_S)


@pytest.fixture
def engine(start: Callable[..., Toy], tmp_path: Path) -> Callable[..., Toy]:
    return partial(start, rollouts=f"file://{tmp_path}")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RolloutStore]:
    with closing(open_rollouts(f"file://{tmp_path}")) as opened:
        yield opened


def told_of(begun: Future[dict[str, Any]] | None) -> dict[str, Any]:
    assert begun is not None
    return begun.result(GIVE_UP_S)


def left(toy: Toy, key: Key, tokens: list[int] = TOKENS, *, cut: bool = False, weights: int = 0) -> dict[str, Any]:
    """A request with these tokens, the first of which are its prompt, was computed by these weights and has ended."""
    toy.weights = weights
    toy.ask("of nobody", tokens)
    return told_of(toy.scheduler.finished(key, toy.table, len(tokens), Tokens([*tokens, 7], PROMPT, cut)))


def own(text: str, choice: int = 0, group: str | None = None) -> Key:
    """A client's key."""
    return Key(text, True, choice, group)


def answered(tokens: list[int] = TOKENS, **more: Any) -> dict[str, Any]:
    """An answer without a handle: of a stream, or of a request that a front end has ended by itself."""
    said = {"prompt_token_ids": tokens[:PROMPT], "token_ids": [*tokens[PROMPT:], 7]}
    return {"id": "r", "choices": [{"index": 0, **said}], "kv_transfer_params": None, **more}


# One key, one request -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [False, True])
def test_routes_are_found_by_the_key_that_the_request_carried(
    engine: Callable[..., Toy], store: RolloutStore, cut: bool
) -> None:
    """Goal: an answer without a handle has its rows, whatever its front end has cut off. Method: two requests with one
    prompt and keys of their own; the whole answer and shorter ones."""
    toy = engine()
    left(toy, own("a"), cut=cut)
    left(toy, own("b"), [*TOKENS[:5], 2], cut=cut)
    for rows in (6, 5, 4, 3, 2) if cut else (6,):  # the last one without a word
        answer = answered()
        answer["choices"][0]["token_ids"] = [*TOKENS, 7][PROMPT : rows + 1]
        assert judge(routes(answer, rollouts=store, key="a", wait_s=0), TOKENS[:rows]) == {"right": rows}
    with pytest.raises(kvroute.RowError, match="rows of other tokens"):
        routes(answered(), rollouts=store, key="b", wait_s=0)


def test_a_list_of_prompts_has_one_key(engine: Callable[..., Toy], store: RolloutStore) -> None:
    """Goal: each prompt of a list has its rows, though the server gives all of them the request's key. Method: two
    prompts that begin alike."""
    toy, prompts = engine(), ([3, 1, 4, 1], [3, 1, 5, 9])
    for tokens in prompts:
        left(toy, own("a"), tokens)
    for tokens in prompts:
        assert judge(routes(answered(tokens), rollouts=store, key="a", wait_s=0), tokens) == {"right": 4}


def test_each_of_several_completions_has_a_key_of_its_own(engine: Callable[..., Toy], store: RolloutStore) -> None:
    """Goal: equal completions of one prompt do not get each other's rows. Method: vLLM's ids of two completions, with
    the same tokens by different weights."""
    toy, keys = engine(weights_version=1), [Key.of(f"{i}_cmpl-x-0-12345678", "a") for i in (0, 1)]
    assert [key.text for key in keys] == [choice_key("a", 0), choice_key("a", 1)] == ["a~0", "a~1"]
    for weights, key in enumerate(keys):
        toy.scheduler.reset()
        toy.cached.clear()
        left(toy, key, weights=weights)
    for weights in (0, 1):
        found = routes(answered(), rollouts=store, key=choice_key("a", weights), wait_s=0)
        assert judge(found, TOKENS, [weights] * 6) == {"right": 6}
    with pytest.raises(kvroute.RowError, match="under the key a within"):
        routes(answered(), rollouts=store, key="a", wait_s=0)


@pytest.mark.parametrize("name", ["5_1", "12_7_0", "2026_step", "0_1", "7_abc-12345678"])
def test_an_id_that_begins_like_a_child_s_has_the_number_in_its_key(name: str) -> None:
    """Goal: one rule, which a client knows. Method: ids of a client's own, and others that are no child's."""
    number = name.partition("_")[0]
    assert Key.of(name, "k") == Key(f"k~{number}", True, int(number), name.partition("_")[2])
    assert Key.of(name) == Key(name, False, int(number), name.partition("_")[2])
    for other in ("cmpl-1_2", "_1", "²_1", "x", "9876543210_1"):
        assert Key.of(other, "k") == Key("k", True)
        assert Key.of(other) == Key(other)


# A key that comes again -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_a_key_that_is_used_again_finds_no_other_request_s_rows(
    engine: Callable[..., Toy], store: RolloutStore, cut: bool, again: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Goal: of a second epoch, a restarted engine or another engine over the same store with the same key and, by
    greedy decoding, the same tokens, nobody gets the other's rows. Method: two engines with different weights, the
    second ``again`` after it was restarted; by key, and by the handles."""
    told = [left(engine(weights_version=1), own("a"), cut=cut)]
    left(engine(weights_version=1), own("of-another"), cut=cut)
    assert routes(answered(), rollouts=store, key="a", wait_s=0).weights_versions == ((0, 6, 1),)
    for version in (2, 3)[: 1 + again]:
        told.append(left(engine(weights_version=version), own("a"), cut=cut, weights=version))
        with pytest.raises(kvroute.RowError, match="a key that no other request has had with this prompt, got 'a'"):
            routes(answered(), rollouts=store, key="a", wait_s=WAIT_S)
        found = routes(answered(kv_transfer_params=told[-1]), rollouts=store)
        assert found.weights_versions == ((0, 6, version),)
        assert judge(found, TOKENS, [version] * 6) == {"right": 6}
        assert "kvroute.key: wanted one that no other request has had" in caplog.text
    with pytest.raises(kvroute.RowError, match="there and sound, got miss"):
        routes(answered(kv_transfer_params=told[0]), rollouts=store)
    assert routes(answered(), rollouts=store, key="of-another", wait_s=0).weights_versions == ((0, 6, 1),)


@pytest.mark.parametrize("cut", [False, True])
def test_a_retried_request_gets_no_rows_of_its_first_try(
    engine: Callable[..., Toy], store: RolloutStore, cut: bool
) -> None:
    """Goal: as above, before the engine has seen the second one's end. Method: a client's library sends a request
    again, with its key; the first one was aborted, the second says other tokens, and its client looks at once; or the
    same ones and more."""
    left(engine(), own("a"), cut=True)
    for tokens in ([*TOKENS[:4], 8, 8], [*TOKENS, 7, 1]):
        with pytest.raises(kvroute.RowError, match="rows of "):
            routes(answered(tokens), rollouts=store, key="a", wait_s=0)
    left(engine(), own("a"), [*TOKENS[:4], 8, 8], cut=cut)
    for tokens in (TOKENS, [*TOKENS[:4], 8, 8]):
        with pytest.raises(kvroute.RowError, match="a key that no other request has had"):
            routes(answered(tokens), rollouts=store, key="a", wait_s=WAIT_S)


def test_a_request_that_loses_its_rows_finds_none_of_an_earlier_one(
    engine: Callable[..., Toy], store: RolloutStore
) -> None:
    """Goal: a stream's client, who sees no error, finds nothing. Method: a worker is behind when the second request of
    a key ends."""
    left(engine(), own("a"))
    toy = engine(late=True, limits={"answer_s": 0.0})
    admitted(toy, TOKENS, [5, 2])
    toy.scheduler.step({"r": 6})
    told = told_of(toy.scheduler.finished(own("a"), [5, 2], 6, Tokens([*TOKENS, 7], PROMPT)))
    with pytest.raises(kvroute.RowError, match="a worker that is behind"):
        routes(answered(kv_transfer_params=told), rollouts=store, key="a", wait_s=WAIT_S)
    with pytest.raises(kvroute.RowError, match="a key that no other request has had"):
        routes(answered(), rollouts=store, key="a", wait_s=WAIT_S)


def test_engines_share_a_store_though_their_ids_are_the_same(engine: Callable[..., Toy], store: RolloutStore) -> None:
    """Goal: a request without a key disturbs nobody. Method: two engines that count their requests from 0, over one
    store, with the same tokens."""
    told = [left(engine(weights_version=v), Key.of(f"0-{v}0000000"), weights=v) for v in (1, 2)]
    for version, each in zip((1, 2), told, strict=True):
        found = routes(answered(kv_transfer_params=each), rollouts=store)
        assert judge(found, TOKENS, [version] * 6) == {"right": 6}
    with pytest.raises(kvroute.RowError, match="key=, the one that its request carried in kv_transfer_params"):
        routes(answered(), rollouts=store, wait_s=WAIT_S)


@pytest.mark.parametrize("key", ["", "x" * 129, "a b", "a/b", "a@b", "~1", "a~", "a~x", "é", 7, b"a", ["a"]])
def test_a_key_that_is_none_is_refused(store: RolloutStore, key: Any) -> None:
    """Goal: a client's mistake is named. Method: lengths, characters, types; what a choice's key may not be."""
    with pytest.raises(kvroute.RowError, match="key: wanted 1 to 128 letters and digits"):
        routes(answered(), rollouts=store, key=key, wait_s=WAIT_S)


def test_the_longest_key_has_a_place(engine: Callable[..., Toy], store: RolloutStore) -> None:
    """Goal: what a client may choose, a store can hold. Method: the longest key, with every odd character, of a
    completion with a long number."""
    key = choice_key("-_.:" * 32, 10**9 - 1)
    left(engine(), own(key))
    assert judge(routes(answered(), rollouts=store, key=key, wait_s=0), TOKENS) == {"right": 6}
    assert store.find(rollout_id(key, TOKENS[:PROMPT])) is not None


def test_routes_of_an_earlier_request_give_way_at_once(
    engine: Callable[..., Toy], store: RolloutStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: a process that is killed in between leaves no key that looks as if nobody had used it: the next try would
    put the later rows where the earlier client looks. Method: a store in which nothing can be deleted."""
    toy = engine()
    left(toy, own("a"))

    def killed(*_: Any) -> None:
        raise SystemError("killed on purpose")

    monkeypatch.setattr(LocalRollouts, "delete", killed)
    told = left(toy, own("a"))
    assert judge(routes(answered(kv_transfer_params=told), rollouts=store), TOKENS) == {"right": 6}
    with pytest.raises(kvroute.RowError, match="no other request has had with this prompt"):
        routes(answered(), rollouts=store, key="a", wait_s=0)


# Several completions --------------------------------------------------------------------------------------------------


def test_a_store_that_fails_is_reported(engine: Callable[..., Toy], monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the answer says why it has no rows. Method: a store that was closed; an id that no rollout can have."""
    stores: list[RolloutStore] = []

    def opened(url: str) -> RolloutStore:
        stores.append(open_rollouts(url))
        return stores[-1]

    monkeypatch.setattr("kvroute.connector.left.open_rollouts", opened)
    toy = engine()
    told = left(toy, Key("x" * 999))
    with pytest.raises(kvroute.RowError, match="rollout id: wanted at most 200 bytes"):
        routes(answered(kv_transfer_params=told))
    stores[0].close()
    with pytest.raises(kvroute.RowError, match="closed"):
        routes(answered(kv_transfer_params=left(toy, own("a"))))


def test_the_last_member_of_a_group_has_the_data_of_all(engine: Callable[..., Toy]) -> None:
    """Goal: vLLM sends on what comes with the last completion only, and the others carry nothing twice. Method: two of
    one request, one of-another; three of one whose front end may end each by itself, so that any may be the last."""
    toy = engine()
    toy.ask("before", TOKENS)

    def begins(choice: int, group: str) -> None:
        toy.scheduler.begins(Key("of none", choice=choice, group=group))

    def told(choice: int, group: str | None, *, cut: bool = False) -> list[str]:
        key = Key(f"{choice}_{group}", False, choice, group)
        begun = toy.scheduler.finished(key, toy.table, 6, Tokens(TOKENS, 3, cut))
        return sorted(told_of(begun)["kvroute"]["rollouts"])

    for choice, group in ((0, "r"), (1, "r"), (1, "s"), (0, "c"), (1, "c"), (2, "c")):
        begins(choice, group)
    assert told(1, "r") == ["1"]
    assert told(1, "s") == ["1"]
    assert told(0, "r") == ["0", "1"]
    assert told(0, None) == ["0"]
    assert told(0, "c", cut=True) == ["0"]
    assert told(1, "c", cut=True) == ["0", "1"]
    begins(2, "r")  # vLLM sends the engine one after the other
    begins(3, "r")
    assert told(3, "r") == ["3"]
    assert told(2, "r") == ["0", "1", "2", "3"]
    begins(1, "r")  # the same id again, in an engine whose ids have nothing random
    assert told(0, "r") == ["0"]
    assert told(1, "r") == ["0", "1", "2", "3"]
    begins(0, "t")
    begins(1, "t")
    assert told(0, "t") == ["0"]
    toy.scheduler.unanswered(toy.scheduler.forget("of none"), Key("of none", choice=1, group="t"))
    begins(2, "t")
    assert told(2, "t") == ["0", "2"]


def test_a_second_try_puts_nothing_twice(store: RolloutStore) -> None:
    """Goal: routes that a lost process has put are found by key and by the handle of the next one; another request's
    in their place are not taken for them. Method: the same routes are left twice, and then those of other weights."""
    tokens = Tokens([*TOKENS, 7], PROMPT, cut=True)
    said = {"index": 0, "prompt_token_ids": TOKENS[:PROMPT], "token_ids": [*TOKENS[PROMPT:], 7]}
    answer = {"id": "r", "choices": [said], "kv_transfer_params": None}

    def put(weights: int) -> Any:
        ids = [row_of(TOKENS[: i + 1], weights) for i in range(6)]
        made = Routes(ids, [True] * 6, (0, 1), EXPERTS, 2)
        return left_values(store, Key("a", of_client=True), made, tokens, (), (), 9, again=True)["rollouts"]

    first = put(0)
    assert put(0) == first
    assert judge(routes(answer, rollouts=store, key="a", wait_s=0), TOKENS) == {"right": 6}
    assert put(1) != first
    with pytest.raises(kvroute.RowError, match="no other request has had with this prompt"):
        routes(answer, rollouts=store, key="a", wait_s=0)
    assert store.find(rollout_id("a", TOKENS[:PROMPT])) is not None
