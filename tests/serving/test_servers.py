"""Prefill, decode and route in this process, over HTTP: right answers, refusals that say why, nothing left behind."""

from __future__ import annotations

import http.client
import io
import json
import shutil
from base64 import b64decode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from mapped_regions import mapped_regions
from ports import hold_port
from serving import Plain, all_blocks_are_back, ask, completion, metrics, served, wait_until

from cache_manager.errors import ConfigError
from kvroute.routes import Routes
from paged_engine.serving.config import DecodeConfig, FrontConfig, PrefillConfig
from paged_engine.serving.decode import DecodeServer
from paged_engine.serving.front import FrontServer
from paged_engine.serving.prefill import PrefillServer
from transfer.curve import make_keys

pytestmark = pytest.mark.xdist_group("servers")  # its servers take seconds to start

SIZES: dict[str, Any] = {"device_blocks": 48, "host_blocks": 16, "memory": "heap", "port": 0}


@dataclass(frozen=True, slots=True)
class Front:
    """The URLs of the three, and the servers behind them."""

    prefill: str
    decode: str
    route: str
    servers: tuple[PrefillServer, DecodeServer, FrontServer]

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        status, answer = ask(self.route, "/v1/completions", body)
        assert status == 200, answer
        return dict(answer)

    def quiet(self) -> bool:
        return all_blocks_are_back(self.prefill) and all_blocks_are_back(self.decode)


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    prefill = PrefillServer(PrefillConfig(name="p0", transfer_address="tcp://127.0.0.1:*", lease_s=60, **SIZES))
    decodes = DecodeServer(DecodeConfig(name="d0", prefills={"p0": prefill.node.address}, retry_s=0.5, **SIZES))
    with served(prefill) as prefill_url, served(decodes) as decode_url:
        nobody = f"http://127.0.0.1:{hold_port()}"
        route = FrontServer(
            FrontConfig(
                port=0,
                prefills={"dead": nobody, "p": prefill_url},
                decodes={"dead": nobody, "d": decode_url},
                health_s=0.1,
                body_max_nbytes=100_000,
            )
        )
        with served(route) as route_url:
            wait_until(lambda: ask(route_url, "/readyz")[0] == 200, "the route is ready")
            yield Front(prefill_url, decode_url, route_url, (prefill, decodes, route))


@pytest.mark.parametrize("more", [{}, {"temperature": 0.0}, {"n": 3}, {"max_tokens": 1}, {"ignore_eos": True}])
def test_tokens_and_routes_are_those_of_a_plain_engine(front: Front, plain: Plain, more: dict[str, Any]) -> None:
    body = completion(len(str(more)), **more)
    answer = front.complete(body)
    assert plain.check(body, answer) == 0
    generated = sum(len(choice["token_ids"]) for choice in answer["choices"])
    assert answer["usage"] == {
        "prompt_tokens": 40, "completion_tokens": generated, "total_tokens": 40 + generated
    }  # fmt: skip


def test_a_prompt_may_be_text_and_the_seed_alone_decides(front: Front) -> None:
    body = completion(1, prompt="What is a block, and who holds it?", seed=5)
    first, second = front.complete(body), front.complete(body)
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    assert first["id"] != second["id"]
    assert front.complete(body | {"seed": 6})["choices"][0]["text"] != first["choices"][0]["text"]


def test_many_at_once_under_pressure(front: Front, plain: Plain) -> None:
    """Goal: no wrong row when requests share blocks and pools are full. Method: 16 at once on 48 blocks each."""
    bodies = [completion(number, n=1 + number % 2, max_tokens=20) for number in range(16)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(front.complete, bodies))
    for body, answer in zip(bodies, answers, strict=True):
        assert plain.check(body, answer) == 0
    wait_until(front.quiet, "all blocks are back")


def test_other_encodings_say_the_same(front: Front) -> None:
    """Goal: clients of SGLang and vLLM read our routes. Method: their decoding, beside kvroute's, of one request."""
    body = completion(9)
    routes = Routes.from_json(front.complete(body)["choices"][0]["routed_experts"])
    assert routes.complete
    sglang = front.complete(body | {"routed_experts_encoding": "sglang"})
    raw = b64decode(sglang["sglext"]["routed_experts"])
    assert np.array_equal(np.frombuffer(raw, np.int32).reshape(-1, 4, 4), routes.ids)
    vllm = front.complete(body | {"routed_experts_encoding": "vllm"})
    assert np.array_equal(np.load(io.BytesIO(b64decode(vllm["choices"][0]["routed_experts"]))), routes.ids)
    assert "routed_experts" not in front.complete(body | {"return_routed_experts": False})["choices"][0]


def events(front: Front, body: dict[str, Any]) -> list[dict[str, Any]]:
    address = urlsplit(front.route)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=120)
    connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}))
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def test_a_stream_adds_up_to_the_answer(front: Front) -> None:
    body = completion(11, n=2)
    whole, parts = front.complete(body), events(front, body)
    for choice in whole["choices"]:
        mine = [c for part in parts for c in part["choices"] if c["index"] == choice["index"]]
        assert [token for c in mine for token in c["token_ids"]] == choice["token_ids"]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert mine[-1]["routed_experts"] == choice["routed_experts"]
    assert len(parts) > 4


def test_a_client_that_goes_away_is_forgotten(front: Front) -> None:
    """Goal: nothing is computed for nobody. Method: close the connection after the first event; blocks come back."""
    wait_until(front.quiet, "all blocks are back")
    before = metrics(front.route)["http_disconnects_total"]
    address = urlsplit(front.route)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=120)
    body = completion(12, max_tokens=500, ignore_eos=True, stream=True)
    connection.request("POST", "/v1/completions", json.dumps(body))
    assert connection.getresponse().readline().startswith(b"data: {")
    connection.sock.close()
    connection.close()
    wait_until(lambda: metrics(front.route)["http_disconnects_total"] == before + 1, "it was noticed")
    wait_until(front.quiet, "all blocks are back")
    wait_until(lambda: metrics(front.decode)["http_requests{in_flight}"] == 0, "decode has forgotten it")
    assert metrics(front.decode)["sequences{running}"] == 0


@pytest.mark.parametrize(
    ("change", "status", "param", "said"),
    [
        ({"model": "gpt"}, 400, "model", "model: wanted qwen3_moe, got 'gpt'"),
        ({"prompt": []}, 400, "prompt", "prompt: wanted at least 1 token, got 0"),
        ({"prompt": ""}, 400, "prompt", "prompt: wanted at least 1 token, got 0"),
        ({"prompt": [512]}, 400, "prompt", "prompt: wanted token ids in [0, 512), got 512"),
        ({"max_tokens": 0}, 400, "max_tokens", "max_tokens: wanted an integer of 1 or more, got 0"),
        ({"max_tokens": 10_000}, 400, None, "wanted prompt and max_tokens of at most 768 tokens together"),
        ({"temperature": -1}, 400, "temperature", "temperature: wanted a number from 0 to 100, got -1.0"),
        ({"top_p": 0.5}, 400, "top_p", "top_p: wanted 1, or nothing"),
        ({"n": 65}, 400, "n", "n: wanted 1 to 64 samples, got 65"),
        ({"seed": -1}, 400, "seed", "seed: wanted an integer in [0, 2**63), got -1"),
        ({"stop_token_ids": [-1]}, 400, "stop_token_ids", "wanted token ids in [0, 512), got -1"),
        ({"routed_experts_encoding": "x"}, 400, "routed_experts_encoding", "wanted one of kvroute, sglang, vllm"),
        ({"logprobs": 3}, 400, "logprobs", "logprobs: wanted one of model, prompt"),
        ({"user": "x" * 200_000}, 413, None, ""),
    ],
)
def test_a_bad_request_is_refused_with_the_field(
    front: Front, change: dict[str, Any], status: int, param: str | None, said: str
) -> None:
    found, answer = ask(front.route, "/v1/completions", completion(1) | change)
    assert found == status, answer
    assert said in answer["error"]["message"]
    assert param is None or answer["error"]["param"] == param
    assert answer["error"]["type"] == "invalid_request_error"
    wait_until(front.quiet, "nothing is held")


def test_what_is_no_request_is_refused(front: Front) -> None:
    for body in (b"", b"{", b"[]", b"\xff\xff", b"[" * 50_000):
        assert ask(front.route, "/v1/completions", body)[0] == 400
    assert ask(front.route, "/v1/chat")[0] == 404
    assert ask(front.route, "/v1/completions")[0] == 405


def test_decode_connects_to_configured_prefills_only(front: Front) -> None:
    """Goal: an address never comes from a message. Method: handovers that name others, or do not fit."""
    prefill = {"id": "x", "prompt": [1, 2, 3], "sampling": {"max_tokens": 4}}
    status, answer = ask(front.prefill, "/v1/prefill", prefill)
    assert status == 200
    handover = answer["kv_transfer"]
    for change, field in (
        ({"prefill": "tcp://10.0.0.1:1"}, "kv_transfer.prefill"),
        ({"namespace": "00" * 16}, "kv_transfer.namespace"),
        ({"prompt_tokens": 4}, "kv_transfer.prompt_tokens"),
        ({"first_tokens": []}, "kv_transfer.first_tokens"),
        ({"first_tokens": [1, 2]}, "kv_transfer.first_tokens"),
        ({"transfer": "zz"}, "kv_transfer.transfer"),
    ):
        status, refused = ask(front.decode, "/v1/decode", prefill | {"kv_transfer": handover | change})
        assert (status, refused["error"]["param"]) == (400, field)
    assert metrics(front.prefill)["transfers{leased}"] == 1
    assert ask(front.prefill, "/v1/release", {"transfer": handover["transfer"]})[0] == 200
    wait_until(front.quiet, "the transfer was released")


def test_prefill_is_told_when_no_decode_will_come(front: Front) -> None:
    """Goal: blocks are not held for a request that has failed. Method: no decode is there; no lease has to end."""
    wait_until(front.quiet, "all blocks are back")
    before = metrics(front.prefill)
    config = FrontConfig(port=0, prefills={"p": front.prefill}, decodes={"dead": f"http://127.0.0.1:{hold_port()}"})
    with served(FrontServer(config)) as route:
        status, answer = ask(route, "/v1/completions", completion(40))
        assert (status, "no decode server could do it" in answer["error"]["message"]) == (503, True)
        wait_until(front.quiet, "all blocks are back")
    after = metrics(front.prefill)
    assert after["transfer_aborted_total"] == before["transfer_aborted_total"] + 1
    assert after["transfer_expired_total"] == before["transfer_expired_total"]


def test_counters_add_up(front: Front) -> None:
    """Goal: every counter has its denominator. Method: sums over all that this module has asked."""
    front.complete(completion(41))
    wait_until(front.quiet, "all blocks are back")
    for url in (front.prefill, front.decode, front.route):
        found = metrics(url)
        outcomes = ("completed", "bad_requests", "refused", "failed", "timeouts", "disconnects")
        ended = sum(found[f"http_{outcome}_total"] for outcome in outcomes)
        assert found["http_requests_total"] == ended + found["http_requests{in_flight}"]
    decoded, prefilled = metrics(front.decode), metrics(front.prefill)
    assert decoded["decode_pulls_total"] == decoded["decode_pulls_finished_total"]
    assert prefilled["prefill_transfers_total"] == prefilled["prefill_transfers_ended_total"]
    assert decoded["decode_transferred_rows_total"] > 0
    attempts = metrics(front.route)
    for kind in ("prefill", "decode"):
        outcomes = ("answered", "unreachable", "busy", "failed", "refused", "given_up")
        ended = sum(attempts[f"{kind}_attempts_{outcome}_total"] for outcome in outcomes)
        assert attempts[f"{kind}_attempts_attempts_total"] == ended
        assert attempts[f"{kind}_ready{{dead}}"] == 0


def test_an_address_that_is_taken_is_named_and_nothing_stays(front: Front) -> None:
    taken = front.servers[0].node.address
    config = PrefillConfig(name="p1", transfer_address=taken, **SIZES | {"memory": "shared"})
    before = regions_of_this_process()
    with pytest.raises(ConfigError) as refused:
        PrefillServer(config)
    assert taken in str(refused.value)
    assert regions_of_this_process() == before
    port = urlsplit(front.prefill).port
    route = FrontServer(FrontConfig(port=port, prefills={"p": "http://h:1"}, decodes={"d": "http://h:1"}))
    with pytest.raises(AssertionError, match="host, port: wanted an address that can be listened on"), served(route):
        pass


def regions_of_this_process() -> set[Path]:
    return mapped_regions("self")


def test_with_curve_only_known_keys_get_blocks(tmp_path: Path, plain: Plain) -> None:
    """Goal: an unknown decode gets nothing. Method: two decodes, of which prefill knows one; both answers are right."""
    for name in ("p0", "friend", "stranger"):
        make_keys(tmp_path, name)
    (tmp_path / "known").mkdir()
    shutil.copy(tmp_path / "friend.key", tmp_path / "known")
    prefill = PrefillServer(
        PrefillConfig(
            name="p0",
            transfer_address="tcp://127.0.0.1:*",
            curve_secret=str(tmp_path / "p0.key_secret"),
            curve_clients=str(tmp_path / "known"),
            lease_s=5,
            **SIZES,
        )
    )
    with served(prefill) as p:
        for name, transferred, retries_max in (("friend", 40, 600), ("stranger", 0, 2)):
            config = DecodeConfig(
                name="d0",
                prefills={"p0": prefill.node.address},
                curve_secret=str(tmp_path / f"{name}.key_secret"),
                curve_server=str(tmp_path / "p0.key"),
                retry_s=0.2,
                retries_max=retries_max,
                **SIZES,
            )
            with served(DecodeServer(config)) as d:
                route = FrontServer(FrontConfig(port=0, prefills={"p": p}, decodes={"d": d}, health_s=0.1))
                with served(route) as url:
                    body = completion(31)
                    wait_until(lambda url=url: ask(url, "/readyz")[0] == 200, "the route is ready")
                    status, answer = ask(url, "/v1/completions", body)
                    assert status == 200
                    assert plain.check(body, answer) == 0
                assert metrics(d)["decode_transferred_rows_total"] == transferred
        wait_until(lambda: all_blocks_are_back(p), "prefill has its blocks back")


def test_a_failed_engine_is_not_ready_and_says_why() -> None:
    """Goal: requests end with a reason. Method: decode's engine fails in a pass; the front hands the reason on.

    Prefill's lease is long: it has its blocks back because the front has told it.
    """
    prefill = PrefillServer(PrefillConfig(name="p0", transfer_address="tcp://127.0.0.1:*", lease_s=250, **SIZES))
    decodes = DecodeServer(DecodeConfig(name="d0", prefills={"p0": prefill.node.address}, **SIZES))

    def fail(*_: object) -> None:
        raise MemoryError("planted")

    with served(prefill) as p, served(decodes) as d:
        config = FrontConfig(port=0, prefills={"p": p}, decodes={"d": d}, health_s=0.1)
        with served(FrontServer(config)) as route:
            wait_until(lambda: ask(route, "/readyz")[0] == 200, "the route is ready")
            assert ask(route, "/v1/completions", completion(1))[0] == 200
            decodes.engine._forward = fail  # type: ignore[method-assign, assignment]
            status, answer = ask(route, "/v1/completions", completion(2))
            assert status == 503
            assert "MemoryError: planted" in answer["error"]["message"]
            assert ask(d, "/readyz") == (503, {
                "status": "not ready", "reason": "the engine has failed: MemoryError: planted"
            })  # fmt: skip
            wait_until(lambda: ask(route, "/readyz")[0] == 503, "the front has seen it")
            assert ask(d, "/healthz")[0] == 200
            wait_until(lambda: all_blocks_are_back(p), "prefill has its blocks back")
