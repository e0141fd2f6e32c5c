"""Prefill and decode as two live engines, one or both of which have two ranks with a part of the KV each.

The first rank of either side has the rows. A rank of decode that has its KV from two ranks of prefill reads the ticket
of the one that has written last. Every row is judged by transformers; a rank is killed for real.
"""

from __future__ import annotations

import os
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from far_judge import Judge
from models import routing
from test_apart import DECODE, LAYERS, Pair, flat, reasons, tally
from test_scenarios import prompts

from kvroute.integrations.sglang.handover import NOT_ASKED

FAMILY = "qwen3_moe_two_kv_heads"
STOCK = [ranks for ranks in os.environ.get("KVROUTE_STOCK_RANKS", "").split(",") if ranks]
"""In which SGLang without kvroute is judged, too: CI has no time."""
RANKS = os.environ.get("KVROUTE_RANKS", "2-2,2-1,1-2").split(",")  # CI has time for one


@pytest.fixture(scope="module")
def judge(model: Callable[..., Path]) -> Judge:
    return Judge({"A": model(FAMILY)})


@pytest.fixture(scope="module", params=RANKS)
def pair(
    request: pytest.FixtureRequest,
    model: Callable[..., Path],
    plugins: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    prefill, decode = map(int, request.param.split("-"))
    more = {"prefill": {"chunked_prefill_size": 64, "tp_size": prefill}, "decode": {"tp_size": decode, **DECODE}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|0")  # else each rank wants a NUMA node of its own
        made = Pair(model(FAMILY), "nixl", tmp_path_factory.mktemp("apart"), plugins, more)
        try:
            made.start()
            yield made
        finally:
            made.close()


def test_decode_has_every_row(pair: Pair, judge: Judge) -> None:
    """Goal: as between engines of one rank. Method: prompts of several chunks that end everywhere in a page, or have a
    part in common, all at once; answers of one token; a retraction for want of room, which all ranks make alike."""
    asked = [*prompts(1, 80, 10, 33, 1, 150), *prompts(2, 31, 32, 33, 64, 65), *prompts(3, 90, 70, 50, head=48)]
    total = tally(judge, "all at once", pair.answers(asked))
    assert total.right == total.due
    total = tally(judge, "one token", pair.answers(prompts(4, 70, 33), new=1))
    assert total.right == total.due > 0
    before = pair.logged("decode").count("KV cache pool is full. Retract requests.")
    total = tally(judge, "retraction", pair.answers(prompts(7, *[100] * 6), new=240))
    assert total.right == total.due
    assert pair.logged("decode").count("KV cache pool is full. Retract requests.") > before


def test_rows_are_asked_for_at_one_side_alone(pair: Pair, judge: Judge) -> None:
    """Goal: a reason, whichever rank of prefill has written last, and the order of their tickets stays the same."""
    asked = prompts(5, 70, 33)
    asks = pair.asks(asked)
    prefill = pair.requests.submit(pair["prefill"].answers, [{**ask, "return_routed_experts": False} for ask in asks])
    answers = flat(asked, pair["decode"].answers(asks))
    prefill.result()
    assert tally(judge, "prefill was not asked", answers).right == 2 * 19 * LAYERS
    assert reasons(answers) == {NOT_ASKED}
    total = tally(judge, "both were asked", pair.answers(asked))
    assert total.right == total.due


@pytest.mark.parametrize("rank", [1, 0])
def test_a_rank_of_prefill_is_killed(pair: Pair, judge: Judge, rank: int) -> None:
    """Goal: decode answers, no row is wrong, and what is missing has a reason. Method: a rank of prefill is killed as
    soon as prefill has answered, the other one lives; then a new prefill engine."""
    asked = prompts(8 + rank, 70, 33, 20, 100)
    prefill, decode = pair.both(pair.asks(asked, new=60))
    prefill.result()
    if not pair["prefill"].kill_rank(rank):
        pytest.skip("prefill has no such rank")
    answers = flat(asked, decode.result())
    assert tally(judge, f"rank {rank} of prefill is killed", answers).right >= len(asked) * 59 * LAYERS
    pair["prefill"].kill()
    total = tally(judge, "and another", pair.answers(asked))
    assert total.right == total.due


@pytest.mark.parametrize("ranks", STOCK)
def test_stock_answers_with_what_lies_in_its_buffer(
    ranks: str, model: Callable[..., Path], plugins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: what kvroute is for. Method: the prompts of :func:`test_decode_has_every_row`, asked of SGLang alone; a
    field that an answer lacks is counted, too."""
    prefill, decode = map(int, ranks.split("-"))
    more = {"prefill": {"chunked_prefill_size": 64, "tp_size": prefill}, "decode": {"tp_size": decode, **DECODE}}
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|0")
    home = model(FAMILY)
    pair, found = Pair(home, "nixl", tmp_path, plugins, more), Counter[str]()
    for role in ("prefill", "decode"):
        pair.stock(role, routed=True)
    try:
        pair.start()
        asked = [*prompts(1, 80, 10, 33, 1, 150), *prompts(2, 31, 32, 33, 64, 65), *prompts(3, 90, 70, 50, head=48)]
        answers = pair.answers(asked)
        answers += pair.answers(prompts(4, 70, 33), new=1)
        answers += pair.answers(prompts(7, *[100] * 6), new=240)
    finally:
        pair.close()
    for answer in answers:
        assert "error" not in answer, answer
        due = routing(home, [*answer["prompt"], *answer["tokens"]][:-1])
        field = answer["meta"].get("routed_experts")
        if field is None:
            found["no field"] += due.shape[0] * due.shape[1]
            continue
        rows = np.sort(np.frombuffer(b64decode(field), np.int32).reshape(len(due), -1, due.shape[2]), axis=-1)
        right = (rows[:, rows.shape[1] - due.shape[1] :] == due).all(axis=2)
        found.update(right=int(right.sum()), wrong=int((~right).sum()))
    print(f"stock, {ranks}: {dict(found)}")
    assert found["wrong"] > 0, "what kvroute is for"
