"""The journal against an engine that forgets: it returns the row that each token was sampled with, or marks it
missing."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from budget import examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sample_routes import Shape

from cache_manager.errors import RowError
from kvroute.journal import RequestJournal
from kvroute.routes import Routes, SamplingSupport
from kvroute.routing import routing_spec

SHAPE = Shape()
SPEC = routing_spec(SHAPE.num_experts, SHAPE.top_k, SHAPE.layer_ids, SHAPE.num_layers, block_tokens=8)


def row(position: int, computation: int) -> bytes:
    return SHAPE.ids([position], computation)[0].astype(np.uint16).tobytes()


def rows_of(routes: Routes) -> dict[int, bytes]:
    return {routes.start + i: routes.ids[i].tobytes() for i in np.flatnonzero(routes.valid).tolist()}


class ForgetfulEngine(RuleBasedStateMachine):
    """One request in an engine that preempts, loses rows, changes weights and takes further turns.

    A row's content says its position and the computation that made it, and every loss begins a new computation. The
    oracle looks at the moment of sampling itself: it notes which computation made the KV when a token is drawn. The
    engine tells the journal nothing then; it records what it holds when it is about to lose it, as the real one does. A
    row that leaves the blocks before it was recorded is lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self.journal = RequestJournal(SPEC)
        self.tokens = [1, 2, 3]
        self.generated = False
        self.computation = self.version = 0
        self.versions = {0: 0}  # computation -> weights version
        self.held: dict[int, int] = {}  # position -> computation, where the blocks have a row
        self.computed = 0
        self.sampled: dict[int, int | None] = {}  # the oracle; None: lost before it was recorded
        self.told: set[int] = set()  # positions whose row of this computation the journal has been told
        self.client: Routes | None = None

    # What an engine does

    @rule(count=st.integers(1, 6))
    def compute(self, count: int) -> None:
        stop = min(self.computed + count, len(self.tokens))
        for position in range(self.computed, stop):
            self.held[position] = self.computation
        self.computed = stop

    @precondition(lambda self: self.computed == len(self.tokens) < 40)
    @rule(token=st.integers(0, 9))
    def sample(self, token: int) -> None:
        for position in range(len(self.tokens)):
            known = position in self.held or position in self.told
            self.sampled.setdefault(position, self.computation if known else None)
        self.tokens.append(token)
        self.generated = True

    @precondition(lambda self: self.generated and len(self.tokens) < 30)
    @rule(tokens=st.lists(st.integers(10, 19), min_size=1, max_size=5))
    def next_turn(self, tokens: list[int]) -> None:
        """The answer is heard; the next turn's prompt goes on from it, and nothing has been sampled for it."""
        self.note_told(0, self.flush(self.journal))
        self.tokens += tokens
        self.generated = False

    @rule(update=st.booleans())
    def drop(self, update: bool) -> None:
        """Preempted without room to swap, aborted to be resumed, or overtaken by a weight update."""
        self.note_told(0, self.flush(self.journal))
        self.journal.discard_unsettled()
        self.held, self.told, self.computed = {}, set(), 0
        self.computation += 1
        self.version += update
        self.versions[self.computation] = self.version

    @precondition(lambda self: self.computed > 0)
    @rule(data=st.data())
    def lose_rows(self, data: st.DataObject) -> None:
        """Rows disappear and KV stays: a store that gave KV without rows, an evicted record."""
        start = data.draw(st.integers(0, self.computed - 1))
        for position in range(start, data.draw(st.integers(start + 1, self.computed))):
            was_there = self.held.pop(position, None) is not None
            if was_there and position not in self.told and self.sampled.get(position) == self.computation:
                self.sampled[position] = None

    # Other calls that may reach the journal

    @precondition(lambda self: self.computed > 0)
    @rule(data=st.data())
    def a_delta_is_recorded_early_or_twice(self, data: st.DataObject) -> None:
        start = data.draw(st.integers(0, self.computed - 1))
        stop = data.draw(st.integers(start, self.computed))
        part = self.routes_held(start, stop)
        self.journal.record(part)
        self.journal.record(part)
        self.note_told(start, stop)

    @rule(count=st.integers(0, 40))
    def the_client_takes_a_delta(self, count: int) -> None:
        self.note_told(0, self.flush(self.journal))
        have = self.client.stop if self.client is not None else 0
        delta = self.journal.routes(start=have, stop=max(have, min(have + count, self.journal.settled)))
        self.client = delta if self.client is None else self.client.merge(delta)

    # The claims

    @invariant()
    def the_journal_keeps_its_word(self) -> None:
        """All claims about the journal's answer if the engine recorded its rows now."""
        journal = copy.deepcopy(self.journal)
        self.flush(journal)
        self.rows_are_those_that_tokens_were_sampled_with(journal)
        if self.client is not None:  # routes that a client holds never change
            assert rows_of(self.client) == rows_of(journal.routes(stop=self.client.stop))

    def rows_are_those_that_tokens_were_sampled_with(self, journal: RequestJournal) -> None:
        expected = {p: row(p, c) for p, c in self.sampled.items() if c is not None}
        found = journal.routes(stop=journal.settled)
        assert journal.settled == len(self.sampled)
        assert rows_of(found) == expected
        known = {p: version for a, b, version in found.weights_versions for p in range(a, b)}
        assert known == {p: self.versions[c] for p, c in self.sampled.items() if c is not None}
        assert [p for a, b in journal.lost for p in range(a, b)] == [p for p, c in self.sampled.items() if c is None]
        if self.sampled:
            found.validate(self.tokens)

    # The engine's side of the bargain

    def routes_held(self, start: int, stop: int) -> Routes:
        valid = np.array([p in self.held for p in range(start, stop)], dtype=bool)
        ids = np.zeros((stop - start, len(SHAPE.layer_ids), SHAPE.top_k), np.int64)
        for p in range(start, stop):
            if p in self.held:
                ids[p - start] = SHAPE.ids([p], self.held[p])[0]
        spans = [(p, p + 1, self.versions[self.held[p]]) for p in range(start, stop) if p in self.held]
        layout: Any = (SHAPE.layer_ids, SHAPE.num_experts, SHAPE.num_layers)
        return Routes(ids, valid, *layout, start, tuple(spans))

    def flush(self, journal: RequestJournal) -> int:
        """Tell ``journal`` all that the blocks hold, as the engine does; how many positions that is."""
        stop = min(self.computed, len(self.tokens) - 1) if self.generated else self.computed
        journal.record(self.routes_held(0, stop))
        if self.generated:
            journal.settle(self.tokens)
            journal.settle(self.tokens)
        return stop

    def note_told(self, start: int, stop: int) -> None:
        """The journal has been told the rows that the blocks have of these positions."""
        self.told |= {position for position in self.held if start <= position < stop}


TestForgetfulEngine = ForgetfulEngine.TestCase
TestForgetfulEngine.settings = examples(200, stateful_step_count=30)


def test_rows_of_a_prompt_that_is_computed_again_before_the_first_token_are_not_kept() -> None:
    """Goal: no row of an abandoned computation replaces a missing one. Found by the machine."""
    journal = RequestJournal(SPEC)
    journal.record(SHAPE.routes(0, [True] * 5, versions=((0, 5, 1),)))
    journal.discard_unsettled()
    assert (journal.stop, len(journal.routes())) == (0, 0)
    journal.record(SHAPE.routes(0, [False, True, True], salt=1, versions=((0, 3, 2),)))
    journal.settle([5, 6, 7, 8])
    assert journal.lost == ((0, 1),)
    assert rows_of(journal.routes()) == {1: row(1, 1), 2: row(2, 1)}
    assert journal.routes().weights_versions == ((1, 3, 2),)


def test_a_lost_row_is_replaced_by_one_of_the_same_weights_alone() -> None:
    """Goal: a row that the same weights compute again takes the place of a lost one, and of no other row. Method: rows
    of three positions are lost; the caller vouches for the last of them alone."""
    journal = RequestJournal(SPEC)
    assert journal.record(SHAPE.routes(0, [True, False, False, False, True])).tolist() == [0, 4]
    journal.settle(range(6))
    again = SHAPE.routes(0, [True, True, False, True, True], salt=1)
    assert journal.record(again).tolist() == []
    assert journal.record(again, same_from=2).tolist() == [3]
    assert journal.lost == ((1, 3),)
    assert rows_of(journal.routes()) == {0: row(0, 0), 3: row(3, 1), 4: row(4, 0)}


def test_a_row_that_lacks_a_layer_is_kept_and_gives_way_to_a_whole_one() -> None:
    """Goal: what is known of a row is not lost, and a row is of one computation. Method: a settled row lacks its last
    layer; the same weights compute it again, without its first layer, and then whole."""
    journal = RequestJournal(SPEC)
    layers = len(SHAPE.layer_ids)
    without_last = [True] * (layers - 1) + [False]
    without_first = [False] + [True] * (layers - 1)
    journal.record(SHAPE.routes(0, [[True] * layers, without_last]))
    journal.settle(range(3))
    assert journal.lost == ((1, 2),)
    for known, computation in ((without_first, 0), ([True] * layers, 2)):
        journal.record(SHAPE.routes(0, [[True] * layers, known], salt=2), same_from=0)
        routes = journal.routes()
        assert routes.known[1].tolist() == (without_last if computation == 0 else known)
        cells = routes.known[1]
        assert (routes.ids[1][cells] == SHAPE.ids([1], computation)[0][cells]).all()
    assert journal.lost == ()


def test_what_cannot_be_is_refused_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Method: another model's rows, too many, and no tokens; then a history that was tokenised anew."""
    monkeypatch.setattr("kvroute.journal.TOKENS_MAX", 8)
    journal = RequestJournal(SPEC)
    journal.record(SHAPE.whole(4))
    for wrong in (Shape(num_experts=301).whole(3), Shape(layer_ids=(0, 4)).whole(3), SHAPE.whole(9)):
        with pytest.raises(RowError, match="routes"):
            journal.record(wrong)
    with pytest.raises(RowError, match="tokens: wanted 9 at most"):
        journal.settle(list(range(10)))
    with pytest.raises(RowError, match="tokens: wanted integers"):
        journal.settle([[1, 2]])
    with pytest.raises(RowError, match=r"inside \[0, 4\], got \[0, 5\)"):
        journal.routes(stop=5)
    assert journal.routes() == SHAPE.whole(4)
    journal.settle([5, 6, 7, 8, 9])
    with pytest.raises(RowError, match="token at position 2: wanted 7, got 70"):
        journal.settle([5, 6, 70, 8, 9, 10])
    journal.settle([5, 6])
    assert (journal.settled, journal.routes()) == (4, SHAPE.whole(4).bind([5, 6, 7, 8, 9]))


class DrawingEngine(RuleBasedStateMachine):
    """One request whose tokens are drawn from known sets; it is preempted, aborted, resumed, and takes further turns.

    The oracle notes what each token was drawn from when it is drawn. The engine tells the journal in pieces of any
    size, early, late or twice; it loses some; and computes rows again as often as it likes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.journal = RequestJournal(SPEC)
        self.tokens = [1, 2, 3]
        self.drawn: dict[int, list[int]] = {}  # the oracle
        self.told: dict[int, list[int]] = {}
        self.settled = False

    @precondition(lambda self: len(self.tokens) < 40)
    @rule(token=st.integers(0, 9), others=st.sets(st.integers(0, 19), max_size=4))
    def draw_a_token(self, token: int, others: set[int]) -> None:
        self.drawn[len(self.tokens)] = sorted({token, *others})
        self.tokens.append(token)
        self.settled = False

    @precondition(lambda self: len(self.tokens) < 30)
    @rule(tokens=st.lists(st.integers(10, 19), min_size=1, max_size=5))
    def a_tool_or_the_next_turn_adds_tokens(self, tokens: list[int]) -> None:
        self.tokens += tokens
        self.settled = False

    @rule(computation=st.integers(0, 3))
    def compute_rows_and_lose_the_kv(self, computation: int) -> None:
        ids = SHAPE.ids(range(len(self.tokens) - 1), computation)
        layout = SHAPE.layer_ids, SHAPE.num_experts, SHAPE.num_layers
        self.journal.record(Routes(ids, np.ones(len(ids), bool), *layout))
        self.journal.settle(self.tokens)
        self.journal.discard_unsettled()
        self.settled = True

    @rule(data=st.data())
    def tell_a_part(self, data: st.DataObject) -> None:
        start = data.draw(st.integers(0, len(self.tokens)))
        stop = data.draw(st.integers(start, len(self.tokens)))
        lost = data.draw(st.sets(st.integers(start, stop), max_size=3))
        rows = [None if p in lost else self.drawn.get(p) for p in range(start, stop)]
        support = SamplingSupport.of(rows, self.tokens, start)
        if not self.settled and stop > len(self.journal.support()):
            before = self.journal.support()
            with pytest.raises(RowError, match="the tokens that settle"):
                self.journal.record_support(support)
            assert self.journal.support() == before
            self.journal.settle(self.tokens)
            self.settled = True
        self.journal.record_support(support)
        self.journal.record_support(support)
        self.told |= {start + i: row for i, row in enumerate(rows) if row is not None}

    @precondition(lambda self: bool(self.told))
    @rule(data=st.data())
    def another_draw_of_a_token_is_refused(self, data: st.DataObject) -> None:
        position = data.draw(st.sampled_from(sorted(self.told)))
        other = [*self.told[position], 20]
        before = self.journal.support()
        with pytest.raises(RowError, match=f"sampling support of position {position}"):
            self.journal.record_support(SamplingSupport.of([other], self.tokens, position))
        assert self.journal.support() == before

    @invariant()
    def a_support_read_is_what_the_token_was_drawn_from_or_missing(self) -> None:
        support = self.journal.support()
        found = {p: support.row(p).tolist() for p in range(support.stop) if len(support.row(p))}
        assert found == self.told
        if len(self.journal.support()):
            support.validate(self.tokens)
            half = len(support) // 2
            assert self.journal.support(half).ids.tolist() == [i for p in sorted(found) if p >= half for i in found[p]]


TestDrawingEngine = DrawingEngine.TestCase
TestDrawingEngine.settings = examples(100, stateful_step_count=30)
