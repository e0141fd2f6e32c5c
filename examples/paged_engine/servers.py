"""Two small HTTP servers: prefill computes prompts and lends their blocks, decode goes on from them.

What ``POST /v1/completions`` of prefill answers, as soon as it has begun, is what decode's takes as ``handover``;
without one decode computes the prompt itself. ``GET /healthz`` and ``/counters`` are for whoever looks after them. Both
run small models with seeded weights. A process whose engine fails ends with the cause, so that whatever started it can
start it again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import msgspec
import torch
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from cache_manager.errors import ConfigError, InvalidInputError, KVRouteError
from cache_manager.keys import Namespace
from paged_engine import text
from paged_engine.bodies import Completion, Handed, parse
from paged_engine.findings import Traffic
from paged_engine.handover import DecodeEngine, PrefillEngine
from paged_engine.loop import EngineThread
from paged_engine.models import build_model, weights_digest
from paged_engine.request import EngineConfig, FinishReason, Output, Request
from transfer import TransferLimits, ZmqLink, ZmqSettings
from transfer.zmq_settings import check_address

logger = logging.getLogger(__name__)

BODY_MAX_NBYTES: Final = 1 << 20
BODY_S: Final = 10.0
"""How long a client may take to send its request."""
REQUESTS_MAX: Final = 64
REQUEST_S: Final = 300.0
DRAIN_S: Final = 10.0
"""How long requests have to finish after SIGTERM; then they are aborted."""
STALLED_S: Final = 60.0
"""An engine whose step takes longer is not well."""
LIMITS: Final = TransferLimits(retry_s=1.0, retries_max=3)


@dataclass(frozen=True, slots=True)
class Settings:
    """The flags of ``kvroute prefill`` and ``kvroute decode``.

    ``peers`` are addresses of transfers: prefill's own, or those of the prefills that decode may fetch from, and no
    other.
    """

    role: Literal["prefill", "decode"]
    port: int
    peers: Sequence[str] = ()
    host: str = "127.0.0.1"
    model: str = "qwen3_moe"
    seed: int = 0
    weights_version: int = 0
    device_blocks: int = 256
    host_blocks: int = 0

    def __post_init__(self) -> None:
        numbers = (("port", 0, 65_535), ("seed", 0, (1 << 63) - 1), ("weights_version", 0, (1 << 32) - 1))
        for name, low, high in (*numbers, ("device_blocks", 1, 1 << 20), ("host_blocks", 0, 1 << 20)):
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"--{name.replace('_', '-')}", f"{low} to {high}", getattr(self, name))
        for address in self.peers:
            check_address(address, "--transfer-address" if self.role == "prefill" else "--prefill", curve=False)


class Server:
    """One of the two, around an engine in a thread of its own."""

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(1)
        self.settings, self.url = settings, ""
        self.http = dict.fromkeys(("requests", "answered", "refused", "failed", "left", "in_flight"), 0)
        self._draining = False
        model = build_model(settings.model, seed=settings.seed, vocab_size=text.VOCAB_SIZE)
        self._model = f"{settings.model}/{weights_digest(model)}"
        config = EngineConfig(device_blocks=settings.device_blocks, host_blocks=settings.host_blocks, memory="shared")
        prefill = settings.role == "prefill"
        link = ZmqLink(ZmqSettings(bind=settings.peers[0] if prefill else None))
        kind = PrefillEngine if prefill else DecodeEngine
        namespace = Namespace(self._model, settings.weights_version)
        self.engine = kind(model, config, namespace, link=link, limits=LIMITS)
        self.thread = EngineThread(self.engine, failed=self.end)
        self._app = web.Application(client_max_size=BODY_MAX_NBYTES, middlewares=[self._in_words])
        self._app.router.add_post("/v1/completions", self._complete)
        self._app.router.add_get("/healthz", self._healthz)
        self._app.router.add_get("/counters", self._counters)

    # ---------------------------------------------------------------- requests

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        if (http.content_length or 0) > BODY_MAX_NBYTES:
            raise web.HTTPRequestEntityTooLarge(BODY_MAX_NBYTES, http.content_length or 0)
        async with asyncio.timeout(BODY_S):
            sent = await http.read()  # before it counts: one who never ends it takes no place
        body, request = await asyncio.to_thread(self._asked, sent)  # to tokenise is work
        if self._draining or self.http["in_flight"] >= REQUESTS_MAX:
            why = "the server is ending" if self._draining else f"{REQUESTS_MAX} requests are in flight already"
            raise web.HTTPServiceUnavailable(reason=why)
        self.http["in_flight"] += 1
        try:
            async with asyncio.timeout(REQUEST_S):
                if isinstance(self.engine, PrefillEngine):
                    return await self._prefill(self.engine, request)
                return await self._decode(self.engine, http, body, request)
        finally:
            self.http["in_flight"] -= 1

    def _asked(self, sent: bytes) -> tuple[Completion, Request]:
        body = parse(sent)
        return body, body.request(f"cmpl-{secrets.token_hex(16)}", self.settings.model)

    def _handed(self, request: Request, transfer: str | None) -> Handed:
        return Handed(
            transfer=transfer,
            address=self.engine.crossing.address,
            prompt_tokens=len(request.prompt),
            model=self._model,
            weights_version=self.settings.weights_version,
        )

    async def _prefill(self, engine: PrefillEngine, request: Request) -> web.Response:
        told: asyncio.Future[bytes | None] = self._loop.create_future()

        def tell(transfer: bytes | None) -> None:
            self._loop.call_soon_threadsafe(_give, told, transfer)

        ended = asyncio.wrap_future(self.thread.submit(request.id, lambda: engine.lend(request, tell)))
        ended.add_done_callback(lambda done: done.cancelled() or done.exception())  # it has its answer by then
        try:
            await asyncio.wait((told, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not told.done():
                self.thread.abort(request.id)
        if not told.done():
            _whole(ended.result())  # raises: it has failed, or was aborted
        transfer = await told
        return _json(msgspec.to_builtins(self._handed(request, transfer.hex() if transfer else None)))

    async def _decode(
        self, engine: DecodeEngine, http: web.Request, body: Completion, request: Request
    ) -> web.StreamResponse:
        handover, note = None, ""
        if body.handover is not None:
            handover, note = body.handover.taken(self._handed(request, None), tuple(self.settings.peers))
        add = (lambda: engine.add(request)) if handover is None else (lambda: engine.take_over(request, handover))
        stream = _Stream(http, request.id) if body.stream else None
        future = asyncio.wrap_future(self.thread.submit(request.id, add, stream.tell if stream else None))
        try:
            if stream is not None:
                await stream.follow(future)
            outputs = _whole(await future)
        except (KVRouteError, web.HTTPException) as error:
            if stream is None or not stream.begun:
                raise
            return await stream.end({"error": {"message": str(error)}, "choices": []})
        finally:
            if not future.done():
                self.thread.abort(request.id)  # nobody waits for it any more
        answer = await asyncio.to_thread(self._answer, body, request, outputs, note)  # to encode rows is work
        return _json(answer) if stream is None else await stream.end(answer)

    def _answer(self, body: Completion, request: Request, outputs: tuple[Output, ...], note: str) -> dict[str, Any]:
        choices = []
        for output in outputs:
            choice: dict[str, Any] = {"index": output.sample, "text": text.decode(output.tokens)}
            choice |= {"token_ids": output.tokens, "finish_reason": output.reason.value}
            if body.return_routed_experts:
                choice |= {"routed_experts": output.routes.to_json(), "missing_rows": output.routes.missing}
            choices.append(choice)
            note = note or output.note
        answer = {"id": request.id, "object": "text_completion", "model": self.settings.model, "choices": choices}
        counts = {"prompt_tokens": len(request.prompt), "completion_tokens": sum(len(o.tokens) for o in outputs)}
        return answer | {"usage": counts | {"total_tokens": sum(counts.values())}, "handover_note": note or None}

    # ---------------------------------------------------------------- health and errors

    async def _healthz(self, _: web.Request) -> web.Response:
        ago_s, node = self.thread.turned_ago_s, self.engine.crossing.node
        why = "the server is ending" if self._draining else ""
        why = f"the engine has been in one step for {ago_s:.0f} s" if ago_s > STALLED_S else why
        why = why if node.alive else f"the transfer node has ended: {node.last_error}"
        if why:
            raise web.HTTPServiceUnavailable(reason=why)
        return _json({"status": "live"})

    async def _counters(self, _: web.Request) -> web.Response:
        """What this process has done, and what it holds."""
        engine, nodes = self.engine, self.engine.crossing.node.counters
        found: dict[str, Any] = {"http": self.http, "transfers": asdict(nodes)}
        found["traffic"] = asdict(Traffic.of(engine))
        found["free"] = {"device": engine.manager.free_device_blocks, "host": engine.manager.free_host_blocks}
        found["of"] = {"device": self.settings.device_blocks, "host": self.settings.host_blocks}
        if isinstance(engine, DecodeEngine):
            found["decode"] = asdict(engine.decode_counters)
        else:
            found["prefill"] = {"lent": len(engine.lent)}  # copies: no block is held for them
        return _json(found)

    @web.middleware
    async def _in_words(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Every failure is an answer of one line that says what it was; a client that leaves is none."""
        self.http["requests"] += (asked := request.method == "POST")
        try:
            response = await handler(request)
            self.http["answered"] += asked
            return response
        except (ConnectionError, asyncio.CancelledError) as error:
            self.http["left"] += 1
            if isinstance(error, ConnectionError):
                return web.Response(status=499)  # nobody is there to read it
            raise
        except web.HTTPException as error:
            status, said = error.status, error.reason
        except (InvalidInputError, HttpProcessingError, web.RequestPayloadError) as error:
            status, said = 400, str(error)
        except TimeoutError:
            status, said = 504, f"not within {BODY_S:.0f} s for the request and {REQUEST_S:.0f} s for the answer"
        except KVRouteError as error:
            status, said = 500, str(error)
        self.http["refused" if status < 500 else "failed"] += asked
        error_of = {"message": " ".join(said.split()), "code": status}
        return web.json_response({"error": error_of}, status=status)

    # ---------------------------------------------------------------- life

    def end(self) -> None:
        """As SIGTERM does; from any thread."""
        self._loop.call_soon_threadsafe(self._ended.set)

    async def serve(self, *, signals: bool = True) -> int:
        """Serve until :meth:`end`, finish what is in flight, give everything back. 1 when the engine has failed."""
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT) if signals else ():
            self._loop.add_signal_handler(number, self._ended.set)
        # A client that leaves cancels its handler, so that nothing is computed for it.
        runner = web.AppRunner(self._app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        try:
            await runner.setup()
            await web.TCPSite(runner, self.settings.host, self.settings.port).start()
            self.thread.start()
            self.url = "http://{}:{}".format(*runner.addresses[0][:2])
            address = self.engine.crossing.address
            self._say(f"{self.settings.model} with seeded weights at {self.url}{address and f', lending at {address}'}")
            await self._ended.wait()
            self._draining = True
            await _until(lambda: not self._cares, DRAIN_S)
            self.thread.abort()
            await _until(lambda: not self.http["in_flight"], DRAIN_S / 2)
        except OSError as error:
            at = f"{self.settings.host}:{self.settings.port} ({error.strerror})"
            raise ConfigError("--host, --port", "an address that is free", at) from error
        finally:
            await runner.cleanup()
            await asyncio.to_thread(self._close)
        self._say("ended" if self.thread.failure is None else str(self.thread.failure))
        return 0 if self.thread.failure is None else 1

    @property
    def _cares(self) -> bool:
        """Whether somebody still needs this process."""
        lent = isinstance(self.engine, PrefillEngine) and bool(self.engine.lent)
        return self.thread.failure is None and bool(self.http["in_flight"] or lent)

    def _close(self) -> None:
        if not self.thread.close(DRAIN_S):
            logger.error("the engine's thread does not end; its memory is left to the operating system")
            return
        try:
            self.engine.close()
        except Exception:
            if self.thread.failure is None:
                raise
            logger.exception("the engine that has failed cannot be closed either")

    def _say(self, what: str) -> None:
        sys.stdout.write(f"kvroute {self.settings.role}: {what}\n")
        sys.stdout.flush()


class _Stream:
    """An answer in events: tokens as they come, then the whole answer with its routes, without what has been said."""

    def __init__(self, http: web.Request, request_id: str) -> None:
        self._http, self._id = http, request_id
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, tuple[int, ...]] | None] = asyncio.Queue()  # as many as steps
        self._said: dict[int, tuple[int, ...]] = {}
        self._response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})

    @property
    def begun(self) -> bool:
        return self._response.prepared

    def tell(self, sample: int, generated: tuple[int, ...]) -> None:
        """In the engine's thread."""
        self._loop.call_soon_threadsafe(self._events.put_nowait, (sample, generated))

    async def follow(self, future: asyncio.Future[tuple[Output, ...]]) -> None:
        """What fails before a token has come is still an answer with a status of its own."""
        future.add_done_callback(lambda _: self._events.put_nowait(None))
        while (event := await self._events.get()) is not None:
            if len(event[1]) > len(self._said.get(event[0], ())):
                choice = self._new(*event, text.decode_whole) | {"finish_reason": None}
                await self._send({"id": self._id, "object": "text_completion", "choices": [choice]})

    async def end(self, answer: dict[str, Any]) -> web.StreamResponse:
        for choice in answer["choices"]:
            choice |= self._new(choice["index"], choice["token_ids"], text.decode)
        await self._send(answer)
        await self._response.write(b"data: [DONE]\n\n")
        await self._response.write_eof()
        return self._response

    def _new(self, sample: int, tokens: tuple[int, ...], decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
        said = self._said.get(sample, ())
        self._said[sample] = tokens
        piece = decode(tokens)[len(text.decode_whole(said)) :]
        return {"index": sample, "text": piece, "token_ids": tokens[len(said) :]}

    async def _send(self, event: dict[str, Any]) -> None:
        if not self._response.prepared:
            await self._response.prepare(self._http)
        await self._response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")


def _give(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():  # whoever waited may have left
        future.set_result(value)


def _whole(outputs: tuple[Output, ...]) -> tuple[Output, ...]:
    if any(output.reason is FinishReason.ABORT for output in outputs):
        raise web.HTTPServiceUnavailable(reason="the request was aborted: the server is ending")
    return outputs


async def _until(true: Callable[[], bool], within_s: float) -> None:
    """Returns when it is ``true``, or the time is over."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + within_s
    while not true() and loop.time() < end_s:
        await asyncio.sleep(0.02)


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value) + b"\n", content_type="application/json")


def prefill(**flags: Any) -> int:
    """``kvroute prefill``."""
    return _serve(Settings("prefill", **flags))


def decode(**flags: Any) -> int:
    """``kvroute decode``."""
    return _serve(Settings("decode", **flags))


def _serve(settings: Settings) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return asyncio.run(Server(settings).serve())


__all__ = ["Server", "Settings", "decode", "prefill"]
