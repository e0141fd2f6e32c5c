"""Prefill and decode as two live engines of SGLang, whose KV goes over Mooncake or NIXL.

The client asks both at once, as SGLang's router does, and reads decode's answer alone. Every row is judged by
transformers, and what is missing has a reason. Engines are stopped and killed for real. The table in
``docs/prefill-decode.md`` says what decode's rows of a prompt are then.
"""

from __future__ import annotations

import json
import os
import signal
import time
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from conftest import engine_environment
from drawn_judge import CUT, judge_drawn
from far_judge import Judge, Tally
from fronts import Front
from nursery import nursery
from ports import hold_port
from serve import FIXED
from standing_still import send_signal
from test_scenarios import PAGE, prompts
from waiting import until

from bench.harness import PeerError
from kvroute import Routes
from kvroute.connector.tickets import NO_TICKET
from kvroute.integrations.sglang.handover import NOT_ASKED

LAYERS = 3
SMALL = {"max_total_tokens": 1024, "max_running_requests": 6, "page_size": PAGE, "context_length": 400}
ROOMS = count(1 << 40)
BACKENDS = os.environ.get("KVROUTE_BACKENDS", "mooncake,nixl").split(",")  # CI has time for one
DECODE = {"num_reserved_decode_tokens": 8, "disaggregation_decode_retraction_backup": "cpu_tensor"}
"""Decode takes more than it has room for; on a CPU the pages on the host that are SGLang's default cannot be used."""


class SglangFront(Front):
    nursery = staticmethod(partial(nursery, "sglang_warm"))


class Engine:
    """An engine of one role in processes of its own."""

    def __init__(self, log: Path, environment: dict[str, str], options: dict[str, Any]) -> None:
        self.ended = False
        self._front = SglangFront("apart_engine", log, environment, json.dumps({"options": options}))

    def answers(self, asks: Sequence[dict[str, Any]], sign: str = "") -> list[Any]:
        """``sign`` is made when each of these streams has its first token."""
        return self._front.ask({"asks": asks, "sign": sign})["answers"]  # type: ignore[no-any-return]

    def act(self, name: str, **arguments: Any) -> Any:
        answer = self._front.ask({"act": [name, arguments]})
        assert "failed" not in answer, answer["failed"]
        return answer["done"]

    def signal(self, number: int) -> None:
        front = psutil.Process(self._front.pid)
        for process in (*front.children(recursive=True), front):
            send_signal(process.pid, number)

    def kill_rank(self, rank: int) -> bool:
        """Whether there is one of this number: they are started one after the other, and last the detokenizer."""
        processes = psutil.Process(self._front.pid).children(recursive=True)
        *ranks, _ = sorted((each for each in processes if not each.children()), key=lambda each: each.pid)
        if rank >= len(ranks):
            return False
        ranks[rank].kill()
        return True

    def kill_replica(self) -> None:
        """One of several: their parent is the controller, which alone of the front's children has some."""
        (controller,) = (each for each in psutil.Process(self._front.pid).children() if each.children())
        controller.children()[-1].kill()

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.ended = True
        self._front.close()

    def close(self) -> None:
        if not self.ended:
            self.ended = True
            self._front.close()


class Pair:
    """A prefill and a decode engine; each starts when it is first asked for, and anew after it was killed."""

    def __init__(
        self, home: Path, backend: str, logs: Path, plugins: Path, more: dict[str, dict[str, Any]] | None = None
    ) -> None:
        self._home, self._backend, self._logs, self._plugins, self._more = home, backend, logs, plugins, more or {}
        self._running: dict[str, Engine] = {}
        self._stock = dict[str, bool]()
        self._starts = count()
        self._log: dict[str, Path] = {}
        self._door = hold_port()
        self.requests = ThreadPoolExecutor(8)

    def stock(self, role: str, *, routed: bool = False) -> None:
        """The role's engine is one without kvroute from its next start on, which may return ``routed`` experts."""
        self._stock[role] = routed

    def __getitem__(self, role: str) -> Engine:
        if role not in self._running or self._running[role].ended:
            has_kvroute = role not in self._stock
            if role == "prefill":  # decode goes on to ask at the old one for what another engine has there now
                self._door = hold_port()
            options = {
                "model_path": str(self._home),
                **FIXED,
                **SMALL,
                "host": "127.0.0.1",
                "log_level": "info",
                "disaggregation_mode": role,
                "disaggregation_transfer_backend": self._backend,
                "disaggregation_bootstrap_port": self._door,
                **self._more.get(role, {}),
            }
            if not self._stock.get(role, True):
                del options["enable_return_routed_experts"]
            environment = engine_environment(self._plugins, kvroute=has_kvroute) | {
                "KVROUTE_SGLANG": json.dumps({"strict": True, "weights": "tiny"}),
                "MOONCAKE_PROTOCOL": "tcp",
                "SGLANG_ENABLE_DISAGG_SAMPLING_MASK": "1",
            }
            self._log[role] = self._logs / f"{role}-{next(self._starts)}.log"
            self._running[role] = Engine(self._log[role], environment, options)
        return self._running[role]

    def logged(self, role: str) -> str:
        return self._log[role].read_text(errors="replace")

    def start(self) -> None:
        for engine in [self.requests.submit(self.__getitem__, role) for role in ("prefill", "decode")]:
            engine.result()

    def asks(self, asked: Sequence[Sequence[int]], new: int = 20, **more: Any) -> list[dict[str, Any]]:
        self["prefill"]  # which has a door
        return [
            {
                "input_ids": list(prompt),
                "sampling_params": {"max_new_tokens": new, "temperature": 1.0, "ignore_eos": True},
                "return_routed_experts": True,
                "bootstrap_host": "127.0.0.1",
                "bootstrap_port": self._door,
                "bootstrap_room": next(ROOMS),
                **more,
            }
            for prompt in asked
        ]

    def both(self, asks: Sequence[dict[str, Any]], sign: str = "") -> tuple[Future[list[Any]], Future[list[Any]]]:
        """The answers of prefill and of decode, asked at once."""
        prefill, decode = self["prefill"], self["decode"]
        return self.requests.submit(prefill.answers, asks), self.requests.submit(decode.answers, asks, sign)

    def answers(self, asked: Sequence[Sequence[int]], **more: Any) -> list[dict[str, Any]]:
        """Decode's answers, with their prompts."""
        prefill, decode = self.both(self.asks(asked, **more))
        prefill.result()
        return flat(asked, decode.result())

    def close(self) -> None:
        for engine in self._running.values():
            engine.close()
        self.requests.shutdown()


def flat(asked: Sequence[Sequence[int]], answers: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"prompt": list(prompt), **answer} for prompt, answer in zip(asked, answers, strict=True)]


def tally(judge: Judge, title: str, answers: Sequence[dict[str, Any]], **given: Any) -> Tally:
    """Every answer came, its field says what its routes say, and none of its rows is wrong."""
    total = Tally()
    for answer in answers:
        assert "error" not in answer, answer
        assert "refused" not in answer, answer
        routes = Routes.from_json(answer["routes"])
        own = np.frombuffer(b64decode(answer["meta"]["routed_experts"]), np.int32)
        same = np.where(routes.known[:, :, None], routes.ids.astype(np.int32), -1)
        assert (same == own.reshape(same.shape)).all()
        gaps = [position for start, stop, _ in answer["missing"] for position in range(start, stop)]
        assert gaps == np.flatnonzero(~routes.known.all(axis=1)).tolist(), "every missing row has a reason"
        total += judge.judge({"prompt": answer["prompt"], "completions": [answer]}, **given)
    print(f"{title}: {total}")
    assert not total.wrong, str(total)
    return total


def reasons(answers: Sequence[dict[str, Any]]) -> set[str]:
    return {why for answer in answers for _, _, why in answer["missing"]}


@pytest.fixture(scope="module")
def judge(model: Callable[..., Path]) -> Judge:
    return Judge({"A": model("qwen3_moe"), "B": model("qwen3_moe", 1)})


@pytest.fixture(scope="module", params=BACKENDS)
def pair(
    request: pytest.FixtureRequest,
    model: Callable[..., Path],
    plugins: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    logs = tmp_path_factory.mktemp("apart")
    more = {"prefill": {"chunked_prefill_size": 64}, "decode": DECODE}
    made = Pair(model("qwen3_moe"), request.param, logs, plugins, more)
    try:
        made.start()
        yield made
    finally:
        made.close()


def test_decode_has_every_row(pair: Pair, judge: Judge) -> None:
    """Goal: SGLang's own field of decode's answer is whole and right, without a router that splices. Method: prompts of
    several chunks that end everywhere in a page, or have a part in common, at temperature 1, all at once; streams;
    answers of one token, for which stock SGLang has no field; and a part of a route. Several choices are requests with
    rooms of their own: with n > 1 SGLang gives all the same room, and its decode engine ends."""
    asked = [*prompts(1, 80, 10, 33, 1, 150), *prompts(2, 31, 32, 33, 64, 65), *prompts(3, 90, 70, 50, head=48)]
    total = tally(judge, "all at once", pair.answers(asked))
    assert total.right == total.due
    for title, more in {"streams": {"stream": True}, "one token": {"new": 1}}.items():
        answers = pair.answers(prompts(4, 70, 33), **more)
        total = tally(judge, title, answers)
        assert total.right == total.due > 0, answers

    answers = pair.answers(prompts(5, 70, 33), routed_experts_start_len=21)
    assert [Routes.from_json(answer["routes"]).start for answer in answers] == [21, 21]


def test_prefill_answers_too(pair: Pair, judge: Judge) -> None:
    """Goal: prefill's own answer has the rows of the prompt. Decode that was not asked for rows fetches none."""
    asked = prompts(6, 70, 33)
    prefill, decode = pair.both(pair.asks(asked))
    total = tally(judge, "prefill", flat(asked, prefill.result()))
    assert total.right == total.due == (70 + 33) * LAYERS
    decode.result()
    asks = pair.asks(asked)
    unasked = [{**ask, "return_routed_experts": False} for ask in asks]
    given = pair.requests.submit(pair["prefill"].answers, asks)
    assert all("error" not in answer for answer in pair["decode"].answers(unasked))
    given.result()
    asks = pair.asks(asked)
    given = pair.requests.submit(pair["prefill"].answers, [{**ask, "return_routed_experts": False} for ask in asks])
    answers = flat(asked, pair["decode"].answers(asks))
    given.result()
    assert tally(judge, "prefill was not asked", answers).right == 2 * 19 * LAYERS
    assert reasons(answers) == {NOT_ASKED}


def drawn(new: int) -> dict[str, Any]:
    """Options of a request whose tokens are drawn."""
    sampling = {"max_new_tokens": new, "ignore_eos": True, **CUT}
    return {"return_sampling_mask": True, "sampling_params": sampling}


def test_decode_has_what_each_token_was_drawn_from(pair: Pair, judge: Judge, model: Callable[..., Path]) -> None:
    """Goal: decode's answer has supports and routes, both whole, in one record. The first token was drawn by prefill,
    from the very logits of decode's KV: SGLang sends its support with the KV. Method: answers of many tokens and of
    one; transformers' logits and routers."""
    for new in (20, 1):
        answers = pair.answers(prompts(12 + new, 70, 33, 1), **drawn(new))
        total = tally(judge, f"{new} drawn tokens", answers)
        assert total.right == total.due > 0
        judge_drawn(model("qwen3_moe"), [answer["drawn"] for answer in answers])


def test_decode_retracts(pair: Pair, judge: Judge, model: Callable[..., Path]) -> None:
    """Goal: what decode retracts, for want of room, has its rows when it goes on, and what its tokens were drawn from.
    Method: answers that need more than all pages together."""
    before = pair.logged("decode").count("KV cache pool is full. Retract requests.")
    answers = pair.answers(prompts(7, *[100] * 6), **drawn(120))
    total = tally(judge, "retraction", answers)
    judge_drawn(model("qwen3_moe"), [answer["drawn"] for answer in answers])
    assert pair.logged("decode").count("KV cache pool is full. Retract requests.") > before
    assert total.right == total.due


def test_prefill_stops_and_is_killed(pair: Pair, judge: Judge, tmp_path: Path) -> None:
    """Goal: whenever prefill stops or ends, decode answers, and no row is wrong. Method: prefill's processes are killed
    when each of decode's requests generates; as soon as prefill has answered; and while they are stopped before the KV
    has come."""
    asked = prompts(8, 70, 33, 20, 100)
    sign = tmp_path / "all have begun"
    _, decode = pair.both(pair.asks(asked, new=150, stream=True), str(sign))
    until(sign.exists)
    pair["prefill"].kill()
    total = tally(judge, "prefill is killed when all was fetched", flat(asked, decode.result()))
    assert total.right == total.due
    prefill, decode = pair.both(pair.asks(asked))
    prefill.result()
    pair["prefill"].kill()
    answers = flat(asked, decode.result())
    assert tally(judge, "prefill is killed when it has answered", answers).right >= len(asked) * 19 * LAYERS
    pair["prefill"].signal(signal.SIGSTOP)
    prefill, decode = pair.both(pair.asks(asked))
    time.sleep(3)
    pair["prefill"].kill()
    with pytest.raises(PeerError):
        prefill.result()
    assert all("error" in answer for answer in decode.result()), "the KV has not come: SGLang fails the request"
    total = tally(judge, "and another", pair.answers(asked))
    assert total.right == total.due


def test_new_weights(pair: Pair, judge: Judge, model: Callable[..., Path]) -> None:
    """Goal: rows are those of the weights that made their KV, or missing with the reason. Method: prefill alone gets
    the weights B, then decode too, both under the same name and version."""
    asked, b = prompts(9, 70, 33), str(model("qwen3_moe", 1))
    given = {"model": b, "version": "2", "flush": True}
    pair["prefill"].act("update", **given)
    answers = pair.answers(asked)
    for answer in answers:
        assert "refused" not in answer
        routes = Routes.from_json(answer["routes"])
        assert not routes.known[: len(answer["prompt"])].any(), "rows of B are none of an engine of A"
    assert all("peer's namespace.weights_version: wanted" in why for why in reasons(answers)), reasons(answers)
    pair["decode"].act("update", **given)
    asked = prompts(10, 70, 33)
    total = tally(judge, "both have new weights", pair.answers(asked), before="B", labels={2: "B"})
    assert total.right == total.due
    assert total.labelled == total.due // LAYERS


def test_prefill_without_kvroute(pair: Pair, judge: Judge) -> None:
    """Goal: a stock engine prefills, decode answers, and says why it has no rows of the prompt."""
    pair["prefill"].kill()
    pair["decode"].kill()
    pair.stock("prefill")
    answers = pair.answers(prompts(11, 70, 33))
    assert tally(judge, "stock prefill", answers).right == 2 * 19 * LAYERS
    assert reasons(answers) == {NO_TICKET}
