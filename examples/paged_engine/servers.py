"""Two small HTTP servers: prefill computes prompts and lends their blocks, decode goes on from them.

What ``POST /v1/completions`` of prefill answers, as soon as it has begun, is what decode's takes as ``handover``;
without one decode computes the prompt itself. ``GET /healthz`` and ``/counters`` are for whoever looks after them. Both
run small models with seeded weights. A process whose engine fails ends with the cause, so that whatever started it can
start it again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final, Literal

import msgspec
import torch
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from cache_manager.errors import ConfigError, InvalidInputError, KVRouteError
from cache_manager.keys import Namespace
from paged_engine import findings, text
from paged_engine.bodies import Completion, Handed, Stream, answer_of, parse
from paged_engine.handover import DecodeEngine, PrefillEngine
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
IDLE_S: Final = 0.02
"""Pause of an engine with nothing to do: transfers are still looked after."""
WAITING_S: Final = 0.002
"""Pause of an engine whose sequences all wait for something outside."""
ABORTED: Final = "the request was aborted: the server is ending"
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
        for address in self.peers:
            check_address(address, "--transfer-address" if self.role == "prefill" else "--prefill", curve=False)


class EngineFailedError(KVRouteError):
    """The engine has failed; it will not come back in this process."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """A prompt is being computed, and lent as this."""

    transfer: bytes | None


_Event = _Begun | tuple[int, tuple[int, ...]] | Output | Exception | None
"""What a request hears: what it is lent as, what a sample has generated so far, its end, a failure, the end of all."""


class Server:
    """One of the two, around an engine in a thread of its own."""

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(1)
        self.settings, self.url = settings, ""
        self.http = dict.fromkeys(("requests", "answered", "refused", "failed", "left", "in_flight"), 0)
        self.failure: EngineFailedError | None = None
        self._draining = self._over = False
        self._stepped_at_s = time.monotonic()
        self._asked: dict[str, asyncio.Queue[_Event]] = {}  # as many events as steps
        model = build_model(settings.model, seed=settings.seed, vocab_size=text.VOCAB_SIZE)
        self._model = f"{settings.model}/{weights_digest(model)}"
        config = EngineConfig(device_blocks=settings.device_blocks, host_blocks=settings.host_blocks, memory="shared")
        prefill = settings.role == "prefill"
        link = ZmqLink(ZmqSettings(bind=settings.peers[0] if prefill else None))
        kind = PrefillEngine if prefill else DecodeEngine
        namespace = Namespace(self._model, settings.weights_version)
        self.engine = kind(model, config, namespace, link=link, limits=LIMITS)
        self._thread = ThreadPoolExecutor(1, "engine")
        self._app = web.Application(client_max_size=BODY_MAX_NBYTES, middlewares=[self._in_words])
        self._app.router.add_post("/v1/completions", self._complete)
        self._app.router.add_get("/healthz", self._healthz)
        self._app.router.add_get("/counters", self._counters)

    # ---------------------------------------------------------------- the engine

    async def _drive(self) -> None:
        """Step the engine, and tell every request what has become of it, until all is over."""
        try:
            while not self._over:
                steps = self.engine.steps
                events = await self._loop.run_in_executor(self._thread, self._step)
                self._stepped_at_s = time.monotonic()
                for request_id, event in events:
                    if request_id in self._asked:
                        self._asked[request_id].put_nowait(event)
                if self.engine.steps == steps:
                    await asyncio.sleep(WAITING_S if self.engine.busy else IDLE_S)
        except Exception as error:
            logger.exception("the engine has failed")
            self.failure = EngineFailedError(f"the engine has failed: {type(error).__name__}: {error}")
            for asked in self._asked.values():
                asked.put_nowait(self.failure)
            self._ended.set()

    def _step(self) -> list[tuple[str, _Event]]:
        """In the engine's thread."""
        outputs = self.engine.step()
        unfinished = self.engine.scheduler.unfinished
        events: list[tuple[str, _Event]] = [(s.request.id, (s.sample, s.generated)) for s in unfinished if s.generated]
        events += [(output.request.id, output) for output in outputs]
        # A request that is aborted before its samples were forked ends with fewer outputs than it has samples.
        ended = {output.request.id for output in outputs} - {sequence.request.id for sequence in unfinished}
        return events + [(request_id, None) for request_id in ended]

    async def _add(self, add: Callable[[], None]) -> None:
        if self.failure is not None:
            raise self.failure
        await self._loop.run_in_executor(self._thread, add)

    # ---------------------------------------------------------------- requests

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        if (http.content_length or 0) > BODY_MAX_NBYTES:
            raise web.HTTPRequestEntityTooLarge(BODY_MAX_NBYTES, http.content_length or 0)
        async with asyncio.timeout(BODY_S):
            sent = await http.read()  # before it counts: one who never ends it takes no place
        body = parse(sent)
        request = await asyncio.to_thread(body.request, f"cmpl-{secrets.token_hex(16)}", self.settings.model)
        if self._draining or self.http["in_flight"] >= REQUESTS_MAX:
            why = "the server is ending" if self._draining else f"{REQUESTS_MAX} requests are in flight already"
            raise web.HTTPServiceUnavailable(reason=why)
        self.http["in_flight"] += 1
        self._asked[request.id] = asyncio.Queue()
        try:
            async with asyncio.timeout(REQUEST_S):
                if isinstance(self.engine, PrefillEngine):
                    return await self._prefill(self.engine, request)
                return await self._decode(self.engine, http, body, request)
        except BaseException:
            self._thread.submit(self.engine.abort, request.id)  # nobody waits for it any more
            raise
        finally:
            self.http["in_flight"] -= 1
            del self._asked[request.id]

    def _handed(self, request: Request, transfer: str | None) -> Handed:
        return Handed(
            transfer=transfer,
            address=self.engine.crossing.address,
            prompt_tokens=len(request.prompt),
            model=self._model,
            weights_version=self.settings.weights_version,
        )

    async def _prefill(self, engine: PrefillEngine, request: Request) -> web.Response:
        asked = self._asked[request.id]

        def tell(transfer: bytes | None) -> None:
            self._loop.call_soon_threadsafe(asked.put_nowait, _Begun(transfer))

        await self._add(lambda: engine.lend(request, tell))
        event = await asked.get()
        if isinstance(event, Exception):
            raise event
        if not isinstance(event, _Begun):
            raise web.HTTPServiceUnavailable(reason=ABORTED)
        transfer = event.transfer.hex() if event.transfer else None
        return answer_of(msgspec.to_builtins(self._handed(request, transfer)))

    async def _decode(
        self, engine: DecodeEngine, http: web.Request, body: Completion, request: Request
    ) -> web.StreamResponse:
        handover, note = None, ""
        if body.handover is not None:
            handover, note = body.handover.taken(self._handed(request, None), tuple(self.settings.peers))
        await self._add(partial(engine.take_over, request, handover) if handover else partial(engine.add, request))
        stream, outputs = Stream(http, request.id) if body.stream else None, list[Output]()
        try:
            while (event := await self._asked[request.id].get()) is not None:
                if isinstance(event, Exception):
                    raise event
                if isinstance(event, Output):
                    outputs.append(event)
                elif isinstance(event, tuple) and stream is not None:
                    await stream.say(*event)
            if any(output.reason is FinishReason.ABORT for output in outputs):
                raise web.HTTPServiceUnavailable(reason=ABORTED)
        except (KVRouteError, web.HTTPException) as error:
            if stream is None or not stream.begun:
                raise
            return await stream.end({"error": {"message": str(error)}, "choices": []})
        answer = await asyncio.to_thread(self._answer, body, request, outputs, note)  # to encode rows is work
        return answer_of(answer) if stream is None else await stream.end(answer)

    def _answer(self, body: Completion, request: Request, outputs: list[Output], note: str) -> dict[str, Any]:
        choices = []
        for output in sorted(outputs, key=lambda output: output.sample):
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
        ago_s, node = time.monotonic() - self._stepped_at_s, self.engine.crossing.node
        why = "the server is ending" if self._draining else ""
        why = f"the engine has been in one step for {ago_s:.0f} s" if ago_s > STALLED_S else why
        why = why if node.alive else f"the transfer node has ended: {node.last_error}"
        if why:
            raise web.HTTPServiceUnavailable(reason=why)
        return answer_of({"status": "live"})

    async def _counters(self, _: web.Request) -> web.Response:
        """What this process has done, and what it holds."""
        engine, nodes = self.engine, self.engine.crossing.node.counters
        found: dict[str, Any] = {"http": self.http, "transfers": asdict(nodes)}
        found["traffic"] = findings.traffic(engine)
        found["free"] = {"device": engine.manager.free_device_blocks, "host": engine.manager.free_host_blocks}
        found["of"] = {"device": self.settings.device_blocks, "host": self.settings.host_blocks}
        if isinstance(engine, DecodeEngine):
            found["decode"] = asdict(engine.crossed)
        else:
            found["prefill"] = {"lent": len(engine.lent)}  # copies: no block is held for them
        return answer_of(found)

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
        driving = asyncio.create_task(self._drive())
        try:
            await runner.setup()
            await web.TCPSite(runner, self.settings.host, self.settings.port).start()
            self.url = "http://{}:{}".format(*runner.addresses[0][:2])
            address = self.engine.crossing.address
            self._say(f"{self.settings.model} with seeded weights at {self.url}{address and f', lending at {address}'}")
            await self._ended.wait()
            self._draining = True
            await _until(lambda: not self._cares, DRAIN_S)
            for request_id in self._asked:
                self._thread.submit(self.engine.abort, request_id)
            await _until(lambda: not self.http["in_flight"], DRAIN_S / 2)
        except OSError as error:
            at = f"{self.settings.host}:{self.settings.port} ({error.strerror})"
            raise ConfigError("--host, --port", "an address that is free", at) from error
        finally:
            self._over = True
            await runner.cleanup()
            if not (await asyncio.wait([driving], timeout=DRAIN_S))[0]:
                logger.error("a step of the engine has not ended within %.0f s: the process ends without it", DRAIN_S)
                os._exit(1)
            await driving
            await asyncio.to_thread(self._close)
        self._say("ended" if self.failure is None else str(self.failure))
        return 0 if self.failure is None else 1

    @property
    def _cares(self) -> bool:
        """Whether somebody still needs this process."""
        lent = isinstance(self.engine, PrefillEngine) and bool(self.engine.lent)
        return self.failure is None and bool(self.http["in_flight"] or lent)

    def _close(self) -> None:
        self._thread.shutdown()
        try:
            self.engine.close()
        except Exception:
            if self.failure is None:
                raise
            logger.exception("the engine that has failed cannot be closed either")

    def _say(self, what: str) -> None:
        sys.stdout.write(f"kvroute {self.settings.role}: {what}\n")
        sys.stdout.flush()


async def _until(true: Callable[[], bool], within_s: float) -> None:
    """Returns when it is ``true``, or the time is over."""
    end_s = time.monotonic() + within_s
    while not true() and time.monotonic() < end_s:
        await asyncio.sleep(0.02)


def prefill(**flags: Any) -> int:
    """``kvroute prefill``."""
    return _serve(Settings("prefill", **flags))


def decode(**flags: Any) -> int:
    """``kvroute decode``."""
    return _serve(Settings("decode", **flags))


def _serve(settings: Settings) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return asyncio.run(Server(settings).serve())
