"""Prefill and decode in this process, over HTTP: right answers, refusals with a reason, nothing left behind."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from serving import DEADLINE_S, Plain, completion

from cache_manager.errors import ConfigError
from paged_engine import processes, servers, text
from paged_engine.processes import until
from paged_engine.servers import Server
from transfer.errors import NodeFullError

pytestmark = pytest.mark.xdist_group("servers")  # its servers take seconds to start


class Served(processes.Server):
    """A server in a thread of this process; it is used like a server in its own process."""

    def __init__(self, server: Server) -> None:
        self.server, self.url, self.command = server, server.url, server.role


@contextmanager
def served(*flags: Any, **more: Any) -> Iterator[Served]:
    """It is drained at the end, with status 0."""
    server, statuses = Server(*flags, **more), list[int]()
    thread = threading.Thread(target=lambda: statuses.append(asyncio.run(server.serve(signals=False))), daemon=True)
    thread.start()
    until(lambda: bool(server.url) or not thread.is_alive(), "it listens", DEADLINE_S)
    try:
        yield Served(server)
    finally:
        server.end()
        thread.join(DEADLINE_S)
    assert statuses == [0]


class Both(processes.Pair):
    def __init__(self, prefill: Served, decode: Served) -> None:
        self.prefill, self.decode = prefill, decode

    def right(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer of both, nothing of which was computed twice."""
        status, answer = self.complete(body)
        assert (status, answer.get("handover_note")) == (200, None), answer
        return dict(answer)

    def quiet(self) -> bool:
        return self.prefill.quiet and self.decode.quiet


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    sizes = {"device_blocks": 48, "host_blocks": 16}
    with pytest.MonkeyPatch.context() as patched, ExitStack() as stack:
        patched.setattr(servers, "DRAIN_S", 1.0)  # prompts that were not fetched are waited for at the end
        prefill = stack.enter_context(served("prefill", 0, ["tcp://127.0.0.1:*"], **sizes))
        address = prefill.server.engine.crossing.address
        yield Both(prefill, stack.enter_context(served("decode", 0, [address], **sizes)))


def connection(served: Served) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(served.url).netloc, timeout=DEADLINE_S)


@pytest.mark.parametrize("more", [{}, {"temperature": 0.0}, {"n": 3}, {"max_tokens": 1}, {"ignore_eos": True}])
def test_tokens_and_routes_are_those_of_a_plain_engine(both: Both, plain: Plain, more: dict[str, Any]) -> None:
    body = completion(len(str(more)), **more)
    answer = both.right(body)
    plain.check(body, answer)
    generated = sum(len(choice["token_ids"]) for choice in answer["choices"])
    usage = {"prompt_tokens": 40, "completion_tokens": generated, "total_tokens": 40 + generated}
    assert answer["usage"] == usage


def test_without_a_handover_decode_computes(both: Both, plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: no prefill is no outage. Method: the body alone; a prefill whose node takes no offer, and a busy one."""
    body = completion(2)

    def full(*_: Any, **__: Any) -> None:
        raise NodeFullError("offers", 0, 1)

    with monkeypatch.context() as patched:
        patched.setattr(both.prefill.server.engine.crossing.lender, "lend", full)
        assert both.prefill.ask("/v1/completions", body)[0] == 503
    with monkeypatch.context() as patched:
        patched.setattr(servers, "REQUESTS_MAX", 0)
        assert both.prefill.ask("/v1/completions", body)[0] == 503
    for status, answer in (both.decode.ask("/v1/completions", body), both.complete(body)):
        assert (status, answer["handover_note"]) == (200, None)
        plain.check(body, answer)


def test_many_at_once_under_pressure(both: Both, plain: Plain) -> None:
    """Goal: no wrong row when requests share blocks and pools are full. Method: 16 at once on 48 blocks each."""
    bodies = [completion(number, n=1 + number % 2, max_tokens=20) for number in range(16)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(both.right, bodies))
    for body, answer in zip(bodies, answers, strict=True):
        plain.check(body, answer)
    until(both.quiet, "all blocks are back", DEADLINE_S)


def test_a_stream_adds_up_to_the_answer(both: Both) -> None:
    body = completion(11, n=2)
    whole = both.right(body)
    asked = connection(both.decode)
    asked.request("POST", "/v1/completions", json.dumps(body | {"stream": True}))
    lines = asked.getresponse().read().decode().splitlines()
    asked.close()
    assert lines[-2:] == ["data: [DONE]", ""]
    *parts, last = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert len(parts) > 4
    assert last | {"id": whole["id"]} == whole
    for choice in whole["choices"]:
        mine = [c for part in parts for c in part["choices"] if c["index"] == choice["index"]]
        said = [token for each in mine for token in each["token_ids"]]
        assert said
        assert said == choice["token_ids"][: len(said)]


def test_a_client_that_goes_away_is_forgotten(both: Both, caplog: pytest.LogCaptureFixture) -> None:
    """Goal: no tokens are computed for a client that has gone, and a disconnect is not an error. Method: close the
    connection after the first event; blocks come back, and nothing is logged. Formerly a traceback was."""
    before, engine = both.decode.counters()["http"]["left"], both.decode.server.engine
    computed = engine.computed_tokens
    asked = connection(both.decode)
    with caplog.at_level(logging.INFO):
        asked.request(
            "POST", "/v1/completions", json.dumps(completion(12, max_tokens=500, ignore_eos=True, stream=True))
        )
        assert asked.getresponse().readline().startswith(b"data: {")
        asked.sock.close()
        asked.close()
        until(lambda: both.decode.counters()["http"]["left"] == before + 1, "it was noticed", DEADLINE_S)
        until(both.quiet, "all blocks are back", DEADLINE_S)
    assert engine.computed_tokens - computed < 500
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({"model": "gpt"}, 400, "model: wanted qwen3_moe, got 'gpt'"),
        ({"prompt": []}, 400, "$.prompt"),
        ({"prompt": [512]}, 400, "$.prompt"),
        ({"max_tokens": 0}, 400, "$.max_tokens"),
        ({"max_tokens": 10_000}, 400, "wanted prompt and max_tokens of at most 768 tokens together"),
        ({"temperature": -1}, 400, "$.temperature"),
        ({"n": 65}, 400, "$.n"),
        ({"frobnicate": 3}, 400, "unknown field `frobnicate`"),
        ({"model": "x" * (2 << 20)}, 413, ""),
    ],
)
def test_a_bad_request_is_one_line_that_names_the_field(
    both: Both, change: dict[str, Any], status: int, said: str
) -> None:
    """Goal: a client's mistake is a 4xx."""
    found, answer = both.prefill.ask("/v1/completions", completion(1) | change)
    assert found == status, answer
    assert said in answer["error"]["message"]
    assert "\n" not in answer["error"]["message"]


def test_an_invalid_request_is_refused(both: Both) -> None:
    for body in (b"", b"{", b"[]", b"\xff\xff", b"[" * 50_000, b'{"model":' + b"[" * 100_000):
        assert both.decode.ask("/v1/completions", body)[0] == 400
    assert both.decode.ask("/v1/chat", b"{}")[0] == 404
    assert both.decode.ask("/v1/completions")[0] == 405


def test_a_compressed_body_is_read_or_refused(both: Both) -> None:
    """Goal: invalid gzip is answered with 400; it was 500. A small body that decompresses to a long one is refused as
    such."""
    sent = json.dumps(completion(1)).encode()
    for body, status in ((gzip.compress(sent), 200), (b"no gzip", 400), (gzip.compress(b" " * (64 << 20)), 413)):
        asked = connection(both.prefill)
        asked.request("POST", "/v1/completions", body, {"Content-Encoding": "gzip"})
        answer = asked.getresponse()
        assert (answer.status, bool(answer.read())) == (status, True)
        asked.close()


def test_bodies_that_never_end_take_no_place(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: unfinished bodies do not block other clients; formerly 64 did. Method: more of them than the limit of
    concurrent requests; other requests are answered meanwhile, and the unfinished ones get an error in time."""
    monkeypatch.setattr(servers, "BODY_S", 3.0)
    address, head = urlsplit(both.decode.url), b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
    opened = [socket.create_connection((address.hostname, address.port or 0)) for _ in range(servers.REQUESTS_MAX + 8)]
    for each in opened:
        each.sendall(head)
    assert both.decode.ask("/v1/completions", completion(1))[0] == 200
    for each in opened:
        assert b" 504 " in each.recv(4096)
        each.close()


def test_a_long_text_delays_no_other_request(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: tokenising does not run in the thread that answers requests; a long text froze that for minutes. Method: a
    tokenizer that waits until another request has been answered."""
    answered, encode = threading.Event(), text.encode

    def slow(given: str) -> list[int]:
        assert answered.wait(DEADLINE_S)
        return encode(given)

    monkeypatch.setattr(text, "encode", slow)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(both.decode.ask, "/v1/completions", completion(1, prompt="How long is this?"))
        assert both.decode.ask("/healthz")[0] == 200
        assert not asked.done()
        answered.set()
        assert asked.result()[0] == 200


def test_decode_connects_to_configured_prefills_only(both: Both) -> None:
    """Goal: an address is never taken from a message. Method: handovers that name others, or do not fit."""
    body = completion(1)
    status, handover = both.prefill.ask("/v1/completions", body)
    assert status == 200
    for change, said in (
        ({"address": "tcp://10.0.0.1:1"}, "handover.address: wanted tcp://127.0.0.1:"),
        ({"transfer": "enp6"}, "$.handover.transfer"),
    ):
        status, refused = both.decode.ask("/v1/completions", body | {"handover": handover | change})
        assert (status, said in refused["error"]["message"]) == (400, True), refused
    assert both.decode.ask("/v1/completions", body | {"handover": handover})[0] == 200
    until(both.quiet, "all blocks are back", DEADLINE_S)


def test_a_wrong_flag_is_named(both: Both) -> None:
    taken = both.prefill.server.engine.crossing.address
    with pytest.raises(ConfigError, match=taken):
        Server("prefill", 0, [taken])
    server = Server("decode", urlsplit(both.decode.url).port or 0)
    with pytest.raises(ConfigError, match="--host, --port: wanted an address that is free"):
        asyncio.run(server.serve(signals=False))
    for role, flag in (("prefill", "--transfer-address"), ("decode", "--prefill")):
        with pytest.raises(ConfigError, match=f"^{flag}: wanted"):
            Server(role, 0, ["tcp://127.0.0.1"])  # type: ignore[arg-type]


def test_health_says_what_is_wrong(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    assert both.decode.ask("/healthz") == (200, {"status": "live"})
    (ended := asyncio.Event()).set()
    monkeypatch.setattr(both.decode.server, "ended", ended)
    status, answer = both.decode.ask("/healthz")
    assert (status, answer["error"]["message"]) == (503, "the server is ending")
