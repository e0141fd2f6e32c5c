"""``kvroute doctor --url`` against servers whose counters and parameters are those of vLLM's engines.

With vLLM itself: one server in ``tests/real/vllm/test_server.py``, a pair in ``tests/real/vllm/test_far_nixl.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from row_server import Engine, none, serving

from kvroute.cli import FAILED, USAGE, main
from kvroute.verify.asking import exchanged
from kvroute.verify.deployment import ASK_TO_LEND, PROMPT


class Side(Engine):
    """One of two engines that exchange KV: prefill gives parameters away, and decode fetches what they name."""

    def __init__(self, *, lends: bool = True, rows: bool = True, fails: bool = False, busy: int = 0) -> None:
        super().__init__("vllm", none)
        self.lends, self.with_rows, self.fails, self.busy = lends, rows, fails, busy
        self.prompts = self.fetched = self.failed = 0

    def answer(self, path: str, asked: dict[str, Any]) -> Any:
        if path == "/metrics":
            return (
                f'vllm:prompt_tokens_total{{engine="0"}} {self.prompts}.0\n'
                f'vllm:prompt_tokens_by_source_total{{source="external_kv_transfer"}} {self.fetched}.0\n'
                f'vllm:nixl_num_failed_transfers_total{{engine="0"}} {self.failed}.0\n'
            )
        if path != "/v1/completions":
            return super().answer(path, asked)
        params = asked.get("kv_transfer_params") or {}
        self.prompts += len(asked["prompt"]) + self.busy
        if params.get("do_remote_prefill"):
            self.fetched += len(asked["prompt"]) - 1
            self.failed += self.fails
        answer = super().answer(path, asked)
        if params.get("do_remote_decode") and self.lends:
            ticket = {"kvroute": {"transfer": {"id": "1"}}} if self.with_rows else {}
            answer["kv_transfer_params"] = {"do_remote_prefill": True, **ticket}
        return answer


class Proxy:
    """Asks prefill, then decode, as a router does; what it drops is the fault."""

    def __init__(self, prefill: str, decode: str, drops: str = "", makes: dict[str, Any] | None = None) -> None:
        self.prefill, self.decode, self.drops, self.makes = prefill, decode, drops, makes

    def answer(self, path: str, asked: dict[str, Any]) -> Any:
        params = {}
        if self.drops != "prefill":
            first = json.loads(
                exchanged(self.prefill + path, {**asked, "max_tokens": 1, "kv_transfer_params": ASK_TO_LEND})
            )
            params = self.makes or first["kv_transfer_params"]
        if self.drops == "request":
            params = {}
        answer = json.loads(exchanged(self.decode + path, {**asked, "kv_transfer_params": params}))
        if self.drops == "answer":
            answer["choices"][0].pop("routed_experts")
        return answer


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def pair(stack: ExitStack, prefill: Side, decode: Side) -> tuple[str, str]:
    return stack.enter_context(serving(prefill)), stack.enter_context(serving(decode))


def doctor(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, list[str]]:
    """The exit status, and the findings but the first words."""
    status = main(["doctor", *flags])
    return status, capsys.readouterr().out.splitlines()


def problems(lines: list[str]) -> list[str]:
    return [line.split(maxsplit=1)[1] for line in lines if line.startswith("PROBLEM")]


def test_one_server(capsys: pytest.CaptureFixture[str], stack: ExitStack) -> None:
    """Method: the engine's own field of both engines, kvroute's error, no rows at all, and no server."""
    for kind in ("vllm", "sglang"):
        url = stack.enter_context(serving(Engine(kind, none)))
        status, lines = doctor(capsys, "--url", url)
        assert status == 0
        assert f" {url}: {'SGLang' if kind == 'sglang' else 'vLLM'} 1.2.3, model small" in lines[0]
        assert "an answer has the engine's own field routed_experts" in lines[1]
        assert "note     metrics" in lines[2]
    status, lines = doctor(capsys, "--url", stack.enter_context(serving(Engine("vllm", lambda *_: None))))
    assert status == FAILED
    assert "an answer has no rows: neither" in problems(lines)[0]
    refuses = Engine("kvroute", lambda *_: None)
    status, lines = doctor(capsys, "--url", stack.enter_context(serving(refuses)))
    assert status == FAILED
    assert "rows were not kept" in problems(lines)[0]
    assert main(["doctor", "--url", "http://127.0.0.1:1", "--json", "-"]) == USAGE
    assert "http://127.0.0.1:1/v1/models: wanted an answer" in capsys.readouterr().err


def test_a_pair_that_exchanges_kv_and_one_that_computes_again(
    capsys: pytest.CaptureFixture[str], stack: ExitStack
) -> None:
    """Goal: a pair that answers right and transfers nothing is found. Method: a pair as it should be; one whose prefill
    lends nothing; one without rows; one whose transfers fail; one that others ask meanwhile, which is not judged."""
    status, lines = doctor(capsys, *_flags(pair(stack, Side(), Side())))
    assert (status, problems(lines)) == (0, [])
    assert any(f"KV of {PROMPT - 1} of {PROMPT} tokens came from prefill" in line for line in lines)
    for prefill, decode, said in (
        (Side(lends=False), Side(), "prefill          lends no KV over NIXL"),
        (Side(rows=False), Side(), "prefill          lends no rows: no ticket of kvroute"),
        (Side(), Side(fails=True), "decode           computes prompts again: 1 transfers of KV failed"),
    ):
        status, lines = doctor(capsys, *_flags(pair(stack, prefill, decode)))
        assert status == FAILED
        assert said in problems(lines)[0]
    status, lines = doctor(capsys, *_flags(pair(stack, Side(), Side(busy=7))))
    assert (status, problems(lines)) == (0, [])
    assert any("others were asking: decode took in 167 tokens" in line for line in lines)


@pytest.mark.parametrize(
    ("drops", "said"),
    [
        ("", ""),
        ("request", "drops kv_transfer_params between prefill and decode: computes every prompt again: KV of 0 of 160"),
        ("prefill", "asks no prefill: computes every prompt again"),
        ("answer", "drops kv_transfer_params of decode's answer, where its rows are"),
    ],
)
def test_a_proxy_that_drops_something(
    capsys: pytest.CaptureFixture[str], stack: ExitStack, drops: str, said: str
) -> None:
    urls = pair(stack, Side(), Side())
    proxy = stack.enter_context(serving(Proxy(*urls, drops)))
    status, lines = doctor(capsys, "--url", proxy, *_flags(urls))
    assert status == (FAILED if drops else 0)
    assert [said in problem for problem in problems(lines)] == ([True] if drops else [])


@pytest.mark.parametrize("drops", ["", "request"])
def test_a_pair_whose_parameters_the_proxy_makes(
    capsys: pytest.CaptureFixture[str], stack: ExitStack, drops: str
) -> None:
    """Goal: a pair over Mooncake is no problem because it is not NIXL's. Method: prefill's answer names no KV, and the
    proxy makes what decode is given: decode's counters alone say whether KV came."""
    urls = pair(stack, Side(lends=False), Side())
    proxy = stack.enter_context(serving(Proxy(*urls, drops, makes={"do_remote_prefill": True})))
    status, lines = doctor(capsys, "--url", proxy, *_flags(urls))
    assert any(line.startswith("note     prefill          lends no KV over NIXL") for line in lines)
    assert status == (FAILED if drops else 0)
    said = "behind it decode computes every prompt again: KV of 0 of 160"
    assert [said in problem for problem in problems(lines)] == ([True] if drops else [])


def test_a_call_that_cannot_be_answered(capsys: pytest.CaptureFixture[str], stack: ExitStack) -> None:
    url = stack.enter_context(serving(Engine("sglang", none)))
    for flags, said in (
        (("--prefill", url), "--prefill, --decode: wanted both or neither"),
        (("--url", url, "--require", "vllm"), "--require: wanted no URL beside it"),
        (_flags((url, url)), "--prefill: wanted vLLM: where SGLang's decode gets no KV"),
    ):
        assert main(["doctor", *flags]) == USAGE
        assert said in capsys.readouterr().err


def _flags(urls: tuple[str, str]) -> tuple[str, ...]:
    return "--prefill", urls[0], "--decode", urls[1]
