"""What the three servers share: health, metrics, errors as JSON, limits, and an end that waits for requests."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

import msgspec
from aiohttp import web

from cache_manager.errors import ConfigError, InvalidInputError, KVRouteError
from paged_engine.serving.config import ServerConfig
from paged_engine.serving.errors import BusyError, DrainingError, ServingError, UpstreamTimeoutError
from paged_engine.serving.metrics import CONTENT_TYPE, HttpCounters, Sources

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
DRAIN_POLL_S: Final = 0.02
ABORT_S: Final = 5.0
"""How long aborted requests have to say so."""


def error_body(message: str, status: int, param: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


class Server:
    """One HTTP server: routes of its own beside ``/healthz``, ``/readyz`` and ``/metrics``.

    Subclasses add routes with :meth:`job`, and say when they are ready and how they end.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.url = ""
        self.draining = False
        self.in_flight = 0
        self.http = HttpCounters()
        self.sources = Sources()
        self.sources.count("http", lambda: self.http)
        self.sources.gauge("http_requests", "Requests in flight.", "state", lambda: {"in_flight": self.in_flight})
        self.app = web.Application(client_max_size=config.body_max_nbytes, middlewares=[self._errors_as_json])
        self.app.router.add_get("/healthz", self._healthz)
        self.app.router.add_get("/readyz", self._readyz)
        self.app.router.add_get("/metrics", self._metrics)

    # ---------------------------------------------------------------- for subclasses

    def not_ready(self) -> str | None:
        """Why the server cannot do its job now; ``None`` when it can."""
        return None

    async def start(self) -> None:
        """Called before HTTP is served."""

    async def finish_others(self, within_s: float) -> None:
        """Requests have been answered: wait, ``within_s`` long, for what others still need of this server."""

    async def abort_requests(self) -> None:
        """The time to finish is over: end what is still in flight."""

    async def stop(self) -> None:
        """Called after HTTP has ended; gives everything back."""

    def banner(self) -> str:
        """What follows the address in the line that says that the server listens."""
        return ""

    def job(self, path: str, handler: Handler) -> None:
        """Serve ``POST path``: counted, limited in number and time, aborted when the client goes away."""

        async def limited(request: web.Request) -> web.StreamResponse:
            self.http.requests += 1
            outcome = "completed"
            try:
                return await self._limited(handler, request)
            except BaseException as error:
                outcome = _outcome(error)
                raise
            finally:
                setattr(self.http, outcome, getattr(self.http, outcome) + 1)

        self.app.router.add_post(path, limited)

    async def _limited(self, handler: Handler, request: web.Request) -> web.StreamResponse:
        if self.draining:
            raise DrainingError("the server is about to end")
        if self.in_flight >= self.config.requests_max:
            raise BusyError(f"{self.config.requests_max} requests are in flight already")
        self.in_flight += 1
        try:
            async with asyncio.timeout(self.config.request_timeout_s):
                return await handler(request)
        except TimeoutError as error:
            limit = f"no answer within request_timeout_s, {self.config.request_timeout_s} s"
            raise UpstreamTimeoutError(limit) from error
        finally:
            self.in_flight -= 1

    # ---------------------------------------------------------------- health

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "live"})

    async def _readyz(self, _: web.Request) -> web.Response:
        reason = "draining" if self.draining else self.not_ready()
        return web.json_response(
            {"status": "ready"} if reason is None else {"status": "not ready", "reason": reason},
            status=200 if reason is None else 503,
        )

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self.sources.exposition(), headers={"Content-Type": CONTENT_TYPE})

    # ---------------------------------------------------------------- errors

    @web.middleware
    async def _errors_as_json(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Every failure is an answer that says what it was."""
        try:
            return await handler(request)
        except ConnectionError:  # there is nobody to answer
            raise
        except web.HTTPException as error:
            status, message, param = error.status, error.reason or "refused", None
        except InvalidInputError as error:
            status, message, param = 400, str(error), error.field
        except ServingError as error:
            status, message, param = error.status, str(error), None
        except KVRouteError as error:
            status, message, param = 500, str(error), None
        except Exception as error:  # the edge of the server: it goes on, and says what it was
            logger.exception("request failed")
            status, message, param = 500, f"{type(error).__name__}: {error}", None
        headers = {"Retry-After": "1"} if status == 503 else None
        return web.json_response(error_body(message, status, param), status=status, headers=headers)

    # ---------------------------------------------------------------- life

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT; see :meth:`serve`."""
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ended.set)
        await self.serve(ended)

    async def serve(self, ended: asyncio.Event) -> None:
        """Serve until ``ended``; then finish what is in flight, at most ``drain_s`` long, and give everything back."""
        # A disconnect cancels the handler, so that nothing is computed for somebody who is not there.
        runner = web.AppRunner(self.app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        try:
            await self.start()
            await runner.setup()
            site = web.TCPSite(runner, self.config.host, self.config.port)
            try:
                await site.start()
            except OSError as error:
                taken = f"{self.config.host}:{self.config.port} ({error.strerror})"
                raise ConfigError("host, port", "an address that can be listened on", taken) from error
            host, port = runner.addresses[0][:2]
            self.url = f"http://{host}:{port}"
            self._say(f"listening on {self.url}{self.banner()}")
            await ended.wait()
            self.draining = True
            self._say(f"draining {self.in_flight} requests, for at most {self.config.drain_s} s")
            await self._finish()
        finally:
            await runner.cleanup()
            await self.stop()
        self._say("ended")

    async def _finish(self) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self.config.drain_s
        await waited(lambda: self.in_flight, self.config.drain_s)
        await self.finish_others(max(0.0, deadline_s - loop.time()))
        if self.in_flight:
            await self.abort_requests()
            await waited(lambda: self.in_flight, ABORT_S)

    def _say(self, text: str) -> None:
        sys.stdout.write(f"kvroute {self.config.command}: {text}\n")
        sys.stdout.flush()


async def waited(busy: Callable[[], object], within_s: float) -> None:
    """Returns when nothing is ``busy`` any more, or the time is over."""
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while busy():
                await asyncio.sleep(DRAIN_POLL_S)


def _outcome(error: BaseException) -> str:
    """The counter that a request which ended with ``error`` belongs to."""
    match error:
        case asyncio.CancelledError() | ConnectionError():
            return "disconnects"
        case InvalidInputError() | web.HTTPClientError():
            return "bad_requests"
        case UpstreamTimeoutError():
            return "timeouts"
        case BusyError() | DrainingError():
            return "refused"
        case _:
            return "failed"


def json_response(value: Any) -> web.Response:
    """``value``, a msgspec struct or plain values, as the whole answer."""
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


__all__ = ["Handler", "Server", "error_body", "json_response", "waited"]
