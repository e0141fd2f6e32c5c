"""Failures between two live engines: stock vLLM in processes of their own, whose KV goes over NIXL.

The table in ``docs/prefill-decode.md`` says what decode's rows of a prompt are then. Every row of every answer is
judged by transformers, and what is missing has a reason. Engines are paused, reset, stopped and killed for real.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engines import GIVE, RANKS, prompts
from far_http import Behind, Proxy
from far_judge import Judge, of_all, verdict
from far_start import Engine, Engines, ask
from ports import hold_port
from row_server import serving
from waiting import until
from weights_judge import assert_told_weights_right

from bench.harness import PeerError
from kvroute.cli import main
from kvroute.connector.carriers.by_transfer import LATE
from kvroute.connector.limits import LIMITS
from kvroute.connector.tickets import MIXED, NO_TICKET

LAYERS = 3
NAMED = {"weights": "tiny", "weights_version": 1, "routing_weights": True}
LABELS = {1: "A"}
HANGS_S = 3
"""How long a peer hangs: longer than rows are waited for, and shorter than NIXL gives it up."""

Params = Sequence[Mapping[str, Any]]
Prompts = Sequence[Sequence[int]]


class Pair:
    """A prefill and a decode engine. Each starts when it is first asked for, and anew after it was killed.

    ``more`` are arguments of the engine of each role.
    """

    def __init__(self, start: Engines, **more: Mapping[str, Any]) -> None:
        self._start, self._more, self._running = start, more, dict[str, Engine]()

    def __getitem__(self, role: str) -> Engine:
        if role not in self._running or self._running[role].ended:
            here = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(hold_port())}
            moved = {"kv_buffer_device": "cpu", "kv_load_failure_policy": "recompute"}
            more = {"max_num_batched_tokens": 96, **self._more.get(role, {})}
            self._running[role] = self._start("KvrouteNixlConnector", NAMED, transfer=moved, variables=here, **more)
        return self._running[role]

    def turn(self) -> None:
        """The two change their roles."""
        self._running = {"prefill": self["decode"], "decode": self["prefill"]}

    def given(self, prefix: str, asked: Prompts) -> list[dict[str, Any]]:
        """The tickets in prefill's answers, for decode."""
        more = {"temperature": 1.0, "max_tokens": 1, "extra_args": {"kv_transfer_params": GIVE}}
        answers = self["prefill"].do([ask(f"{prefix}{i}", p, **more) for i, p in enumerate(asked)])
        return [answer["params"] for answer in answers]

    def taken(
        self, prefix: str, asked: Prompts, params: Params, acts: Sequence[Any] = (), after: int = 0, **more: Any
    ) -> list[dict[str, Any]]:
        """Decode's answers to what prefill has begun; ``acts`` once each of them has ``after`` tokens."""
        asks = [
            ask(f"{prefix}{i}", p, extra_args={"kv_transfer_params": params[i]}, **more) for i, p in enumerate(asked)
        ]
        found = self["decode"].do(asks, acts, after=after)
        return found[0] if acts else found  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def pair(homes: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pytest.importorskip("nixl")
    engines = Engines(homes, tmp_path_factory.mktemp("nixl"))
    yield Pair(engines)
    engines.close()


def why(answer: Mapping[str, Any]) -> str:
    """The reason why the rows of the whole prompt are missing, which is the only gap of the answer."""
    ((start, stop, reason),) = answer["completions"][0]["missing"]
    assert (start, stop) == (0, len(answer["prompt"]) - 1)
    return str(reason)


def with_ticket(params: Mapping[str, Any], ticket: Mapping[str, Any]) -> dict[str, Any]:
    """These parameters with the ticket of another answer, which a client has made to fit their KV."""
    fits = {"transfer": {**ticket["transfer"], "kv": params["kvroute"]["transfer"]["kv"]}}
    return {**params, "kvroute": fits}


def emptied(engine: Engine) -> None:
    """The engine has no KV any more; vLLM refuses that while KV of an earlier request is still fetched."""
    until(lambda: engine.do(acts=[["reset", {"reset_connector": True}]])[1] == [True])


def test_tickets(pair: Pair, judge: Judge, homes: dict[str, Path]) -> None:
    """Goal: a decode engine's answer has every row of the prompt, of the KV that it was given, at any temperature, and
    each id's weight; with
    a ticket of another prompt, a used ticket, or one of no engine, it has the rows that decode computed. Method:
    prompts of several chunks that end everywhere in a block or have a part in common, sampled at temperature 1, so that
    decode's first token is not prefill's; all at once. Then tickets change places, are used again, and name an address
    where no engine lends, while the KV comes; and two computations of the same prompts change theirs."""
    asked = [*prompts(80, 10, 33, 1, shared=150), *prompts(81, 31, 32, 33, 64, 65)]
    answers = pair.taken("d", asked, pair.given("p", asked), temperature=1.0)
    with verdict("decode alone", of_all(judge, answers, labels=LABELS)) as found:
        assert found.right == found.due
    for answer in answers:
        assert_told_weights_right(homes["A"], answer)
    others = prompts(82, 70, 71, 40, 100)
    tickets = [each["kvroute"] for each in pair.given("q", others)]  # and no engine fetches what these lend
    short = prompts(84, 20, 27, 30, 31)  # of no whole block, which decode would have when they come again
    params = pair.given("u", short)
    used = [each["kvroute"] for each in params]
    with verdict(
        "tickets before they are used again", of_all(judge, pair.taken("v", short, params), labels=LABELS)
    ) as found:
        assert found.right == found.due
    lent = [each["kvroute"]["transfer"] for each in pair.given("n", short)]
    nobodys = [{"transfer": {**each, "address": "tcp://127.0.0.1:1"}} for each in lent]
    for which, asked, theirs, reason in (
        ("of other prompts", others, [*tickets[-1:], *tickets[:-1]], "prompt: "),
        ("used again", short, used, "pulled before"),
        ("of no engine", short, nobodys, "s after their KV"),
    ):
        params = [with_ticket(each, theirs[i]) for i, each in enumerate(pair.given(f"{which}-q", asked))]
        answers = pair.taken(f"{which}-e", asked, params)
        with verdict(f"tickets {which}", of_all(judge, answers, labels=LABELS)) as found:
            assert found.right == len(asked) * 20 * LAYERS
        assert all(reason in why(answer) for answer in answers)
    twice = [pair.given(f"twice{i}", short) for i in range(2)]
    params = [{**each, "kvroute": twice[1][i]["kvroute"]} for i, each in enumerate(twice[0])]
    answers = pair.taken("mixed-up-", short, params)
    with verdict("tickets of another computation of their prompts", of_all(judge, answers, labels=LABELS)) as found:
        assert found.right == len(short) * 20 * LAYERS
    assert all("the ticket is of other KV: remote_request_id: wanted twice1" in why(answer) for answer in answers)


def test_doctor_sees_whether_kv_crosses(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: the pair that answers right and computes every prompt again is found (kserve #5987). Method: ``kvroute
    doctor`` asks the two, then through a proxy that hands on what prefill's answer says, and one that drops it."""
    with ExitStack() as opened:
        engines = {role: Behind(partial(pair.__getitem__, role), f"doctor-{role}") for role in ("prefill", "decode")}
        urls = {role: opened.enter_context(serving(engine)) for role, engine in engines.items()}
        flags = [word for role, url in urls.items() for word in (f"--{role}", url)]
        for drops in (False, True):
            proxy = opened.enter_context(serving(Proxy(urls["prefill"], urls["decode"], GIVE, drops=drops)))
            status = main(["doctor", "--url", proxy, *flags])
            lines = [line for line in capsys.readouterr().out.splitlines() if " -> " not in line]
            direct = next(line for line in lines if " decode " in line and "came from prefill" in line)
            assert direct.startswith("ok ")
            assert (status, lines[-1].split()[0]) == ((1, "PROBLEM") if drops else (0, "ok")), lines
            assert ("drops kv_transfer_params between prefill and decode" in lines[-1]) == drops


def test_prefill_hangs_and_is_killed(pair: Pair, judge: Judge) -> None:
    """Goal: whenever prefill stops or ends, decode answers, and no row is wrong. Method: prefill's processes are
    stopped before the fetch and go on while decode waits; are stopped and then killed while it waits; are killed before
    the fetch; and are killed when decode has all and generates. KV that does not come is computed, with its rows. Ids
    that a killed prefill has lent are not known to the one that lends at its address.
    """
    asked, short = prompts(40, 70, 33, 20, 100), prompts(48, 20, 27, 30, 31)  # as in test_tickets
    for what, number, acts in (
        ("prefill hangs for a while", signal.SIGSTOP, [signal.SIGCONT]),
        ("prefill is killed during the fetch", signal.SIGSTOP, [signal.SIGKILL]),
        ("prefill is killed before the fetch", signal.SIGKILL, []),
    ):
        params = pair.given(what, asked)
        lost = [each["kvroute"]["transfer"] for each in pair.given(f"{what}-lost", short)]
        prefill = pair["prefill"]
        pids = prefill.pids
        prefill.signal(number)
        then = [["signal", {"pids": pids, "number": each}] for each in acts]
        answers = pair.taken(f"{what}-", asked, params, [["sleep", {"seconds": HANGS_S}], *then] if then else [])
        if signal.SIGKILL in (number, *acts):
            prefill.killed()
        with verdict(what, of_all(judge, answers, labels=LABELS)) as found:
            assert found.right == found.due
    fresh = pair.given("fresh", short)
    params = [
        with_ticket(each, {"transfer": {**lost[i], "address": each["kvroute"]["transfer"]["address"]}})
        for i, each in enumerate(fresh)
    ]
    answers = pair.taken("lost-", short, params)
    with verdict("tickets of a prefill engine that was killed", of_all(judge, answers, labels=LABELS)) as found:
        assert found.right == len(short) * 20 * LAYERS
    assert {why(answer) for answer in answers} <= {LATE.format(LIMITS.fetch_s), "gone: unknown"}
    params = pair.given("all", asked)
    kill = ["signal", {"pids": pair["prefill"].pids, "number": signal.SIGKILL}]
    answers = pair.taken("all-", asked, params, [kill], after=3, max_tokens=60)
    pair["prefill"].killed()
    with verdict("prefill is killed when all was fetched", of_all(judge, answers, labels=LABELS)) as found:
        assert found.right == found.due


def test_decode_is_killed(pair: Pair, judge: Judge) -> None:
    """Goal: a decode engine that ends during its fetches costs prefill nothing, and what it fetched is fetched by no
    other. Method: prefill is stopped, so that decode waits; decode is killed; prefill goes on, and another decode
    engine fetches from prefill then, and gets tickets that the first one has used."""
    short = prompts(47, 20, 27, 30, 31)  # as in test_tickets
    params = pair.given("first", short)
    used = [each["kvroute"] for each in params]
    pair.taken("first-", short, params)
    asked = prompts(46, 70, 33, 20, 100)
    params = pair.given("lost", asked)
    prefill, decode = pair["prefill"], pair["decode"]
    prefill.signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as beside:
        waiting = beside.submit(pair.taken, "lost-", asked, params)
        time.sleep(HANGS_S)
        decode.signal(signal.SIGKILL)
        with pytest.raises(PeerError):
            waiting.result()
    decode.killed()
    prefill.signal(signal.SIGCONT)
    answers = pair.taken("next-", asked, pair.given("next", asked))
    with verdict("another decode engine", of_all(judge, answers, labels=LABELS)) as found:
        assert found.right == found.due
    params = [with_ticket(each, used[i]) for i, each in enumerate(pair.given("used", short))]
    answers = pair.taken("used-", short, params)
    with verdict("tickets that a killed decode engine used", of_all(judge, answers, labels=LABELS)) as found:
        assert found.right == len(short) * 20 * LAYERS
    assert {why(answer) for answer in answers} == {"gone: foreign"}


def test_new_weights(pair: Pair, judge: Judge, homes: dict[str, Path]) -> None:
    """Goal: rows of a prompt are those of the weights that made its KV, under the version of these, or missing with the
    reason. Method: prefill gets weights B as version 2 between its answers and the fetches, which keeps KV of A; after
    a reset its KV is of B, which decode, at version 1 still, is given; decode gets B and version 2, too; and decode is
    told version 3 during a fetch.
    """
    updated = [["swap", {"home": str(homes["B"])}], ["version", {"given": "2"}]]
    labels = {**LABELS, 2: "B"}

    def seen(what: str, params: Params, *weights: str, right: bool, acts: Sequence[Any] = ()) -> list[dict[str, Any]]:
        answers = pair.taken(f"{what}-", asked, params, acts)
        with verdict(what, of_all(judge, answers, *weights, labels=labels)) as found:
            assert found.right == (found.due if right else len(asked) * 20 * LAYERS)
        return answers

    asked = prompts(41, 70, 33, 20, 100)
    params = pair.given("before", asked)
    pair["prefill"].do(acts=updated)
    pair["prefill"].do([ask("further", prompts(39, 20)[0])])
    seen("lent before the update", params, "A", right=True)
    asked = prompts(42, 70, 33, 20, 100)
    answers = seen("KV of two weights", pair.given("mixed", asked), "B", "A", right=False)
    assert {why(answer) for answer in answers} == {MIXED}
    emptied(pair["prefill"])
    pair["prefill"].do(acts=updated[1:])
    asked = prompts(43, 70, 33, 20, 100)
    answers = seen("prefill is ahead", pair.given("ahead", asked), "B", "A", right=False)
    reasons = {why(answer) for answer in answers}
    assert "refused: peer's namespace.weights_version: wanted 1, got 2" in reasons
    emptied(pair["decode"])
    pair["decode"].do(acts=updated)
    asked = prompts(44, 70, 33, 20, 100)
    seen("both have new weights", pair.given("both", asked), "B", right=True)
    asked, labels[3] = prompts(45, 70, 33, 20, 100), "B"
    params = pair.given("during", asked)
    pids = pair["prefill"].pids
    pair["prefill"].signal(signal.SIGSTOP)
    acts = [
        ["sleep", {"seconds": 1}],
        ["version", {"given": "3"}],
        ["signal", {"pids": pids, "number": signal.SIGCONT}],
    ]
    seen("decode is told a version during the fetch", params, "B", right=True, acts=acts)


def test_unequal_ranks(model: Callable[..., Path], tmp_path: Path) -> None:
    """Goal: rows are the same behind the router of every rank, so engines of unequal tensor parallelism exchange them.
    Method: prefill has one rank and decode two, each with one of two heads of the KV; then the roles change."""
    pytest.importorskip("nixl")
    homes = {"A": model("olmoe")}
    engines, judge = Engines(homes, tmp_path), Judge(homes)
    pair = Pair(engines, decode=RANKS)
    try:
        for role in ("prefill", "decode"):  # what ranks compile at first may take longer than prefill keeps KV
            pair[role].do([ask(f"first of {role}", prompts(92, 20)[0])])
        for what, seed in (("from one rank to two", 90), ("from two ranks to one", 91)):
            asked = prompts(seed, 10, 33, 1, shared=150)
            answers = pair.taken(f"{what}-", asked, pair.given(what, asked), temperature=1.0)
            with verdict(what, of_all(judge, answers, labels=LABELS)) as found:
                assert found.right == found.due
            for answer in answers:
                assert_told_weights_right(homes["A"], answer)
            bare = prompts(seed + 10, 70, 40)
            given = [{**each, "kvroute": None} for each in pair.given(f"{what}-bare", bare)]
            answers = pair.taken(f"{what}-bare-", bare, given)
            with verdict(f"{what}, without tickets", of_all(judge, answers, labels=LABELS)) as found:
                assert found.right == len(bare) * 20 * LAYERS
            assert {why(answer) for answer in answers} == {NO_TICKET}, "the KV came, else its rows were decode's"
            pair.turn()
    finally:
        engines.close()
