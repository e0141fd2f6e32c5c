"""Two small HTTP servers: prefill computes prompts and lends their blocks, decode continues from them.

Prefill answers ``POST /v1/completions`` at once, and decode takes this answer as ``handover``; without one decode
computes the prompt itself. ``GET /healthz`` and ``/counters`` are for operators. Both run small models with seeded
weights. A process whose engine fails ends with the cause, so that its supervisor can restart it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, Final, Literal

import msgspec
import torch
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from msgspec import Meta

from cache_manager.errors import ConfigError, InvalidInputError, KVRouteError
from cache_manager.keys import Namespace
from paged_engine import text
from paged_engine.handover import DecodeEngine, PrefillEngine
from paged_engine.models import build_model, weights_digest
from paged_engine.request import SAMPLES_MAX, EngineConfig, FinishReason, Output, Request
from paged_engine.sequence import Handover
from transfer import TransferLimits, ZmqLink, ZmqSettings
from transfer.errors import NodeFullError
from transfer.zmq_settings import check_address

logger = logging.getLogger(__name__)

Role = Literal["prefill", "decode"]
BODY_MAX_NBYTES: Final = 1 << 20
BODY_S: Final = 10.0
"""How long a client may take to send its request."""
REQUESTS_MAX: Final = 64
REQUEST_S: Final = 300.0
DRAIN_S: Final = 10.0
"""How long requests have to finish after SIGTERM; then they are aborted."""
IDLE_S: Final = 0.02
"""Pause of an engine with nothing to do: it still polls transfers."""
WAITING_S: Final = 0.002
"""Pause of an engine whose sequences all wait for something outside."""
LIMITS: Final = TransferLimits(retry_s=1.0, retries_max=3)

_Event = tuple[int, tuple[int, ...]] | Output | RuntimeError | None
"""Of a request: the tokens of a sample so far, a sample's end, the engine's failure; ``None``: all have ended."""


class Completion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request in OpenAI's form; from ``ignore_eos`` on the keys are vLLM's and kvroute's own."""

    prompt: Annotated[str, Meta(min_length=1)] | Annotated[list[Annotated[int, Meta(ge=0, lt=512)]], Meta(min_length=1)]
    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=1)] = 16
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    n: Annotated[int, Meta(ge=1, le=SAMPLES_MAX)] = 1
    stream: bool = False
    ignore_eos: bool = False
    return_routed_experts: bool = False
    handover: Handover | None = None
    """Prefill's answer. Decode fetches from its own prefills only, whatever address a message names."""

    def request(self, request_id: str, model: str, prefills: Sequence[str]) -> Request:
        """The engine's request; :class:`InvalidInputError` names the field. Encoding a long text takes time."""
        if self.model not in (None, model):
            raise InvalidInputError("model", model, repr(self.model))
        if self.handover is not None and self.handover.address not in prefills:
            known = " or ".join(prefills) or "none: this decode has no --prefill"
            raise InvalidInputError("handover.address", known, repr(self.handover.address)[:80])
        prompt = text.encode(self.prompt) if isinstance(self.prompt, str) else self.prompt
        stops = frozenset() if self.ignore_eos else frozenset({text.END})
        return Request(request_id, tuple(prompt), self.max_tokens, self.n, self.temperature, self.seed, stops)


def parse(body: bytes) -> Completion:
    """Decode ``body``. :class:`InvalidInputError` says in one line what is wrong."""
    try:
        return msgspec.json.decode(body, type=Completion)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInputError("body", "a completion as JSON", str(error)[:200]) from error


def answer_of(value: Any, status: int = 200) -> web.Response:
    body = msgspec.json.encode(value) + b"\n"
    return web.Response(body=body, status=status, content_type="application/json")


class Stream:
    """An answer in events: the new tokens of each sample as they come, then the whole answer with text and routes."""

    def __init__(self, http: web.Request) -> None:
        self._http, self._said = http, Counter[int]()
        self._response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})

    @property
    def begun(self) -> bool:
        """A failure before the first token can still be answered with its own status."""
        return self._response.prepared

    async def say(self, sample: int, generated: tuple[int, ...]) -> None:
        if new := generated[self._said[sample] :]:
            self._said[sample] = len(generated)
            await self._send({"choices": [{"index": sample, "text": "", "token_ids": new, "finish_reason": None}]})

    async def end(self, answer: dict[str, Any]) -> web.StreamResponse:
        await self._send(answer)
        await self._response.write(b"data: [DONE]\n\n")
        await self._response.write_eof()
        return self._response

    async def _send(self, event: dict[str, Any]) -> None:
        if not self.begun:
            await self._response.prepare(self._http)
        await self._response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")


class Server:
    """One of the two, with its engine in a separate thread. The arguments are the command line's flags.

    ``peers`` are addresses of transfers: prefill's own, or those of the only prefills that decode may fetch from.
    """

    def __init__(
        self,
        role: Role,
        port: int,
        peers: Sequence[str] = (),
        host: str = "127.0.0.1",
        model: str = "qwen3_moe",
        seed: int = 0,
        weights_version: int = 0,
        device_blocks: int = 256,
        host_blocks: int = 0,
    ) -> None:
        for address in peers:
            check_address(address, "--transfer-address" if role == "prefill" else "--prefill", curve=False)
        torch.set_num_threads(1)
        self.role, self.model, self.peers, self._at = role, model, tuple(peers), (host, port)
        self.url = ""
        self.http = {"in_flight": 0, "left": 0}
        self.ended = asyncio.Event()  # no request is taken any more
        self._over = False
        self._asked: dict[str, asyncio.Queue[_Event]] = {}  # as many events as steps
        self._left: list[str] = []  # requests whose clients have left
        built = build_model(model, seed=seed, vocab_size=text.VOCAB_SIZE)
        namespace = Namespace(f"{model}/{weights_digest(built)}", weights_version)
        config = EngineConfig(device_blocks=device_blocks, host_blocks=host_blocks)
        kind, bind = (PrefillEngine, peers[0]) if role == "prefill" else (DecodeEngine, None)
        self.engine = kind(built, config, namespace, link=ZmqLink(ZmqSettings(bind=bind)), limits=LIMITS)
        self._thread = ThreadPoolExecutor(1, "engine")
        self._app = web.Application(client_max_size=BODY_MAX_NBYTES, middlewares=[self._in_words])
        self._app.router.add_post("/v1/completions", self._complete)
        self._app.router.add_get("/healthz", self._healthz)
        self._app.router.add_get("/counters", self._counters)

    # ---------------------------------------------------------------- the engine

    async def _drive(self) -> None:
        """Step the engine, and queue the events of every request, until the server ends."""
        try:
            while not self._over:
                steps = self.engine.steps
                for request_id, event in await self._in_thread(self._step):
                    if request_id in self._asked:
                        self._asked[request_id].put_nowait(event)
                if self.engine.steps == steps:
                    await asyncio.sleep(WAITING_S if self.engine.busy else IDLE_S)
        except Exception as error:
            failure = RuntimeError(f"the engine has failed: {type(error).__name__}: {error}")
            for asked in self._asked.values():
                asked.put_nowait(failure)
            self.ended.set()
            raise failure from error

    def _in_thread(self, call: Callable[[], Any]) -> Awaitable[Any]:
        return self._loop.run_in_executor(self._thread, call)

    def _step(self) -> list[tuple[str, _Event]]:
        """Runs in the engine's thread. A failure here, also of an abort, is a failure of the engine."""
        while self._left:
            self.engine.abort(self._left.pop())
        outputs, unfinished = self.engine.step(), self.engine.scheduler.unfinished
        events: list[tuple[str, _Event]] = [(output.request.id, output) for output in outputs]
        events += [(s.request.id, (s.sample, s.generated)) for s in unfinished if s.generated]
        # A request that is aborted before its samples were forked ends with fewer outputs than it has samples.
        ended = {output.request.id for output in outputs} - {sequence.request.id for sequence in unfinished}
        return events + [(request_id, None) for request_id in ended]

    # ---------------------------------------------------------------- requests

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        if (http.content_length or 0) > BODY_MAX_NBYTES:  # aiohttp would read that much first
            raise web.HTTPRequestEntityTooLarge(BODY_MAX_NBYTES, http.content_length or 0)
        async with asyncio.timeout(BODY_S):
            body = parse(await http.read())  # before it is counted: an endless body takes no place
        request = await asyncio.to_thread(body.request, f"cmpl-{secrets.token_hex(16)}", self.model, self.peers)
        at_work = len(self.engine.filling) if isinstance(self.engine, PrefillEngine) else self.http["in_flight"]
        if self.ended.is_set() or at_work >= REQUESTS_MAX:
            why = "the server is ending" if self.ended.is_set() else f"{REQUESTS_MAX} requests are in flight already"
            raise web.HTTPServiceUnavailable(reason=why)
        self.http["in_flight"] += 1
        self._asked[request.id] = asyncio.Queue()
        try:
            async with asyncio.timeout(REQUEST_S):
                if isinstance(self.engine, DecodeEngine):
                    return await self._decode(self.engine, http, body, request)
                return answer_of(await self._in_thread(partial(self.engine.lend, request)))
        except BaseException:
            self._left.append(request.id)
            raise
        finally:
            self.http["in_flight"] -= 1
            del self._asked[request.id]

    async def _decode(
        self, engine: DecodeEngine, http: web.Request, body: Completion, request: Request
    ) -> web.StreamResponse:
        stream, outputs = Stream(http) if body.stream else None, list[Output]()
        await self._in_thread(partial(engine.add, request, body.handover))
        try:
            while (event := await self._asked[request.id].get()) is not None:
                if isinstance(event, RuntimeError):
                    raise event
                if isinstance(event, Output):
                    outputs.append(event)
                elif stream is not None:
                    await stream.say(*event)
            if any(output.reason is FinishReason.ABORT for output in outputs):
                raise web.HTTPServiceUnavailable(reason="the request was aborted: the server is ending")
        except (RuntimeError, web.HTTPException) as error:
            if stream is None or not stream.begun:
                raise
            return await stream.end({"error": {"message": str(error)}, "choices": []})
        answer = await asyncio.to_thread(self._answer, body, request, outputs)  # encoding rows takes time
        return answer_of(answer) if stream is None else await stream.end(answer)

    def _answer(self, body: Completion, request: Request, outputs: list[Output]) -> dict[str, Any]:
        choices, note = [], ""
        for output in sorted(outputs, key=lambda output: output.sample):
            choice: dict[str, Any] = {"index": output.sample, "text": text.decode(output.tokens)}
            choice |= {"token_ids": output.tokens, "finish_reason": output.reason.value}
            if body.return_routed_experts:
                choice |= {"routed_experts": output.routes.to_json(), "missing_rows": output.routes.missing}
            choices.append(choice)
            note = note or output.note
        answer = {"id": request.id, "object": "text_completion", "model": self.model, "choices": choices}
        counts = {"prompt_tokens": len(request.prompt), "completion_tokens": sum(len(o.tokens) for o in outputs)}
        return answer | {"usage": counts | {"total_tokens": sum(counts.values())}, "handover_note": note or None}

    # ---------------------------------------------------------------- health and errors

    async def _healthz(self, _: web.Request) -> web.Response:
        node = self.engine.crossing.node
        if not node.alive:
            raise web.HTTPServiceUnavailable(reason=f"the transfer node has ended: {node.last_error}")
        if self.ended.is_set():
            raise web.HTTPServiceUnavailable(reason="the server is ending")
        return answer_of({"status": "live"})

    async def _counters(self, _: web.Request) -> web.Response:
        return answer_of(await self._in_thread(self._counted))

    def _counted(self) -> dict[str, Any]:
        """What this process has done, and what it holds. Prefill lends copies, and holds no block for them. Runs in the
        engine's thread: a block manager answers one thread at a time."""
        engine, config = self.engine, self.engine.config
        done = asdict(engine.crossed) if isinstance(engine, DecodeEngine) else {"lent": len(engine.lent)}
        found: dict[str, Any] = {"http": self.http, "transfers": asdict(engine.crossing.node.counters), self.role: done}
        found["traffic"] = engine.traffic()
        found["unfinished"] = len(engine.scheduler.unfinished)
        found["free"] = {"device": engine.manager.free_device_blocks, "host": engine.manager.free_host_blocks}
        found["of"] = {"device": config.device_blocks, "host": config.host_blocks}
        return found

    @web.middleware
    async def _in_words(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Every failure gets an answer of one line that says what it was, except a client that leaves."""
        try:
            return await handler(request)
        except ConnectionError:
            self.http["left"] += 1
            return web.Response(status=499)  # it will not be read
        except asyncio.CancelledError:
            self.http["left"] += 1
            raise
        except web.HTTPException as error:
            status, said = error.status, error.reason
        except (InvalidInputError, HttpProcessingError, web.RequestPayloadError) as error:
            status, said = 400, str(error)
        except NodeFullError as error:
            status, said = 503, f"decode has to compute the prompt: {error}"
        except TimeoutError:
            status, said = 504, f"not within {BODY_S:.0f} s for the request and {REQUEST_S:.0f} s for the answer"
        except (KVRouteError, RuntimeError) as error:
            status, said = 500, str(error)
        return answer_of({"error": {"message": " ".join(said.split()), "code": status}}, status)

    # ---------------------------------------------------------------- life

    def end(self) -> None:
        """End as after SIGTERM; may be called from any thread."""
        self._loop.call_soon_threadsafe(self.ended.set)

    async def serve(self, *, signals: bool = True) -> int:
        """Serve until :meth:`end`, finish requests in flight, free everything; then raises if the engine has failed."""
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT) if signals else ():
            self._loop.add_signal_handler(number, self.ended.set)
        # A client that leaves cancels its handler, so that nothing is computed for it.
        runner = web.AppRunner(self._app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        driving = asyncio.create_task(self._drive())
        try:
            await runner.setup()
            await web.TCPSite(runner, *self._at).start()
            self.url = "http://{}:{}".format(*runner.addresses[0][:2])
            address = self.engine.crossing.address
            self._say(f"{self.model} with seeded weights at {self.url}{address and f', lending at {address}'}")
            await self.ended.wait()
            lent = self.engine.lent if isinstance(self.engine, PrefillEngine) else {}
            await _until(lambda: driving.done() or not (lent or self.http["in_flight"]), DRAIN_S)
            self._left += self._asked
            await _until(lambda: not self.http["in_flight"], DRAIN_S / 2)
        except OSError as error:
            at = "{}:{} ({})".format(*self._at, error.strerror)
            raise ConfigError("--host, --port", "an address that is free", at) from error
        finally:
            self._over = True
            await runner.cleanup()
            if not (await asyncio.wait([driving], timeout=DRAIN_S))[0]:
                logger.error("a step of the engine has not ended within %.0f s: the process ends without it", DRAIN_S)
                os._exit(1)
            try:
                await self._in_thread(self.engine.close)
            finally:
                self._thread.shutdown()
                driving.result()
        self._say("ended")
        return 0

    def _say(self, what: str) -> None:
        sys.stdout.write(f"kvroute {self.role}: {what}\n")
        sys.stdout.flush()


async def _until(true: Callable[[], bool], within_s: float) -> None:
    """Returns as soon as ``true()`` holds, or the time is over."""
    end_s = time.monotonic() + within_s
    while not true() and time.monotonic() < end_s:
        await asyncio.sleep(0.02)


def _serve(role: Role, **flags: Any) -> int:
    """``kvroute prefill`` and ``kvroute decode``: serve until SIGTERM; the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return asyncio.run(Server(role, **flags).serve())


prefill, decode = partial(_serve, "prefill"), partial(_serve, "decode")
