"""Answers of SGLang whose routes a process of their own stores: what a store in the engine's process gives, and each
answer comes, with its routes or with the reason, whatever happens to that process."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import budget
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from standing_still import send_signal
from waiting import until

from cache_manager.errors import RowError
from cache_manager.keys import Namespace
from cache_manager.publish import Rows
from kvroute import Routes, routing_spec
from kvroute.connector.answers import missing, routes, unseen
from kvroute.connector.cutting import Cutting
from kvroute.connector.fields import FIELD
from kvroute.connector.key import Key
from kvroute.connector.left import LeftRoutes, Tokens
from kvroute.connector.rollouts_wire import Ended
from kvroute.connector.settings import Lending
from kvroute.integrations.sglang.answers import Answer, AnswerLimits, Answers, RequestRows
from kvroute.integrations.sglang.apart import AllRead, AnswersApart, ended
from kvroute.integrations.sglang.rows import RoutedRows
from kvroute.rollout import RolloutStore, open_rollouts

PAGE = 4
SLOTS = np.arange(PAGE, PAGE + 6)
TOKENS = list(range(7))
SPEC = routing_spec(num_experts=250, top_k=2, layer_ids=[1, 2], num_layers=3, block_tokens=PAGE)


class Engine:
    """An engine whose answers' routes are in ``rollouts``."""

    def __init__(self, rollouts: str, **more: Any) -> None:
        self.rows = RoutedRows(SPEC, 4, Namespace("m", 1), Lending(strict=True, rollouts=rollouts, **more))

    def answer(self, rid: str, salt: int = 0) -> Answer:
        """To a request whose rows are of this salt."""
        ids = torch.arange(36, dtype=torch.int32).reshape(6, 3, 2) + salt
        self.rows.launch(torch.from_numpy(SLOTS), ids).finalize()
        return self.rows.answer(rid, SLOTS, 0, Tokens(TOKENS, 5))

    @staticmethod
    def rows_of(salt: int) -> RequestRows:
        """Whole rows of this salt."""
        values = (np.arange(36).reshape(6, 3, 2)[:, 1:] + salt).astype(SPEC.numpy_dtype)
        none = Rows(np.zeros(6, np.uint32), np.zeros(6, np.bool_))
        rows = Rows(values, np.ones(6, np.bool_))
        return RequestRows(SPEC, rows, none, 0, None, {}, flagged=False, weights=1, mixed=False)

    @property
    def apart(self) -> AnswersApart:
        apart = self.rows.answers.apart
        assert isinstance(apart, AnswersApart)
        return apart

    @property
    def pid(self) -> int:
        until(lambda: self.apart.pid is not None)
        return self.apart.pid or 0


def data(answer: Answer) -> dict[str, Any]:
    """What SGLang sends beside it."""
    until(lambda: answer.ready, what="the answer is not ready")
    return {"meta_info": {"id": "id", FIELD: [answer.data]}, "prompt_token_ids": TOKENS[:5], "output_ids": TOKENS[5:]}


def right(found: Routes, salt: int = 0) -> bool:
    due = np.arange(36).reshape(6, 3, 2)[:, 1:] + salt
    return found.complete and bool((found.ids == due).all())


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(f"apart:?call=3s,file://{tmp_path}/rollouts")
    yield made
    made.rows.close()


@pytest.fixture
def store(engine: Engine, tmp_path: Path) -> Iterator[RolloutStore]:  # noqa: ARG001 - it makes the directory
    with closing(open_rollouts(f"file://{tmp_path}/rollouts")) as opened:
        yield opened


def test_routes_are_found_by_handle_and_by_rid(engine: Engine, store: RolloutStore) -> None:
    """Goal: what a store in the engine's process gives. Method: two requests; and a third with the first one's rid,
    whose routes are found by the handle alone."""
    for salt, rid in enumerate(("a", "b")):
        answer = engine.answer(rid, salt)
        assert right(routes(data(answer), rollouts=store), salt)
        said = {"id": rid, "prompt_token_ids": TOKENS[:5], "choices": [{"index": 0, "token_ids": TOKENS[5:]}]}
        assert right(routes(said, rollouts=store, key=rid), salt)
        assert (answer.field.numpy()[:, 1:] == np.arange(36).reshape(6, 3, 2)[:, 1:] + salt).all()
    assert right(routes(data(engine.answer("a", 7)), rollouts=store), 7)
    said = {"id": "a", "prompt_token_ids": TOKENS[:5], "choices": [{"index": 0, "token_ids": TOKENS[5:]}]}
    with pytest.raises(RowError, match="no other request has had"):
        routes(said, rollouts=store, key="a", wait_s=0)
    assert engine.rows.counters["rollouts"]()["stored"] == 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_each_answer_comes_when_the_process_is_gone_or_hangs(engine: Engine, store: RolloutStore, number: int) -> None:
    """Goal: every answer ends, and none has another one's rows. Method: the process is killed, or stopped, between and
    beside answers; another one takes its place."""
    rids = count()

    def answered(salt: int) -> bool:
        """Whether an answer has its routes; if not, it says why."""
        answer = data(engine.answer(f"r{next(rids)}", salt))
        try:
            found = routes(answer, rollouts=store, wait_s=0)
        except RowError as error:
            assert "a process that stores them" in str(error), error  # noqa: PT017 - on a busy machine alone
            return False
        assert right(found, salt)
        return True

    until(lambda: answered(1))
    send_signal(engine.pid, number)
    for salt in range(2, 6):
        answered(salt)
    until(lambda: answered(7))
    assert engine.apart.counters["restarts"] >= 1


def test_no_process_is_a_reason(engine: Engine, tmp_path: Path) -> None:
    """Goal: an answer without routes says why, and has SGLang's field. Method: a store that no process can open."""
    (tmp_path / "rollouts").rename(tmp_path / "elsewhere")
    (tmp_path / "rollouts").touch()
    send_signal(engine.pid, signal.SIGKILL)
    answer = engine.answer("r", 3)
    with pytest.raises(RowError, match=r"rows|rollout"):
        routes(data(answer))
    assert (answer.field.numpy()[:, 1:] == np.arange(36).reshape(6, 3, 2)[:, 1:] + 3).all()
    assert engine.rows.answers.counters.failed == 1


@pytest.mark.parametrize("scheme", ["", "apart:"])
def test_a_refused_answer_leaves_no_earlier_routes(tmp_path: Path, scheme: str) -> None:
    """Goal: a row is of the request that asked. Method: the second request of a rid, of the same tokens by other
    weights, for whose rows there is no room; further ones, whose questions bring what is to be forgotten."""
    url = f"file://{tmp_path}/rollouts"
    made = Engine(f"{scheme}{url}")
    with closing(made.rows), closing(open_rollouts(url)) as opened:
        assert right(routes(data(made.answer("r", 1)), rollouts=opened), 1)
        whole = made.rows.answers
        left = LeftRoutes() if whole.apart else LeftRoutes.by(url)
        made.rows.answers = Answers(SPEC, left, made.rows.meter, AnswerLimits(answers_max=0), apart=whole.apart)
        with pytest.raises(RowError, match="0 at most, got more"):
            routes(data(made.answer("r", 2)), rollouts=opened)
        made.rows.answers = whole
        rids = count()

        def is_forgotten() -> bool:
            assert right(routes(data(made.answer(f"s{next(rids)}", 3)), rollouts=opened), 3)
            said = {"id": "r", "prompt_token_ids": TOKENS[:5], "choices": [{"index": 0, "token_ids": TOKENS[5:]}]}
            try:
                routes(said, rollouts=opened, key="r", wait_s=0)
            except RowError as error:
                return "no other request has had" in str(error)
            return False

        until(is_forgotten)


def test_rows_that_cannot_be_read_leave_no_earlier_ones(engine: Engine, store: RolloutStore) -> None:
    """Goal: a row is of the request that asked. Method: a second request of a rid whose rows cannot be read, and a
    third one, whose question brings what is to be forgotten."""
    data(engine.answer("r", 1))
    engine.rows.aux.close()
    answer = engine.rows.answer("r", SLOTS, 0, Tokens(TOKENS, 5))
    with pytest.raises(RowError):
        routes(data(answer))
    another = Engine.rows_of(3)
    data(engine.rows.answers.begin("s", another, 6, Tokens(TOKENS, 5)))
    said = {"id": "r", "prompt_token_ids": TOKENS[:5], "choices": [{"index": 0, "token_ids": TOKENS[5:]}]}
    with pytest.raises(RowError, match="no other request has had"):
        routes(said, rollouts=store, key="r", wait_s=0)


@given(st.integers(0, 1 << 32))
@budget.examples(100)
def test_the_process_cuts_what_the_engine_would_cut(seed: int) -> None:
    """Goal: the same routes, positions that are unproved and reasons, whichever process cuts. Method: rows with gaps,
    of several versions and matched by KV, sent as to the process."""
    source = random.Random(seed)
    rng = np.random.default_rng(seed)
    n, start = source.randrange(0, 12), source.randrange(0, 5)
    values = np.array([rng.permutation(250)[:4] for _ in range(n)], SPEC.numpy_dtype).reshape(n, 2, 2)
    rows = RequestRows(
        SPEC,
        Rows(values, rng.random(n) < 0.7),
        Rows(rng.integers(0, 3, (n, 1)).astype(np.uint32)[:, 0], rng.random(n) < 0.7),
        start,
        rng.random(n) < 0.5 if source.random() < 0.6 else None,
        {block: "why" for block in range(5) if source.random() < 0.3},
        flagged=source.random() < 0.5,
        weights=1,
        mixed=False,
    )
    due, unproved, _ = rows.routes()
    tokens = Tokens(list(range(start + n + 1)), start)
    end = ended(Key("r", of_client=True), rows, tokens)
    (seen,) = AllRead().seen([end.computations])
    there = Ended.of(end, end.computations, seen).end(SPEC)
    found, found_unproved, _ = Cutting(SPEC, rows.flagged).routes(there)
    assert found.to_bytes() == due.to_bytes()
    assert found_unproved == unproved
    assert dict(there.why) == dict(rows.reasons)


def test_an_answer_of_kv_that_others_kept(tmp_path: Path) -> None:
    """Goal: reasons and unproved positions come with the handle. Method: rows matched by KV, one of them missing."""
    rows = RequestRows(
        SPEC,
        Rows(np.arange(24, dtype=SPEC.numpy_dtype).reshape(6, 2, 2), np.arange(6) != 2),
        Rows(np.zeros(6, np.uint32), np.zeros(6, np.bool_)),
        0,
        np.arange(6) < 4,
        {0: "gone"},
        flagged=True,
        weights=1,
        mixed=False,
    )
    made = Engine(f"apart:file://{tmp_path}/rollouts", witness="flagged")
    with closing(made.rows):
        answer = data(made.rows.answers.begin("r", rows, 6, Tokens(TOKENS, 5)))
        with closing(open_rollouts(f"file://{tmp_path}/rollouts")) as opened:
            found = routes(answer, rollouts=opened)
    assert found.valid.tolist() == [True, True, False, True, True, True]
    assert missing(answer) == ((2, 3, "gone"),)
    assert list(unseen(answer)) == [(0, 2), (3, 4)]


def test_a_setting_that_cannot_be_is_refused() -> None:
    assert Lending.of({"rollouts": "apart:file:///a"}).rollouts == "apart:file:///a"
    with pytest.raises(Exception, match="apart: and the URL of one rollout store"):
        Lending.of({"rollouts": "apart:file:///a,file:///b"})
