"""The servers of one kind, as the front sees them: who is ready, whose turn it is, what went wrong where."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import msgspec

from cache_manager.errors import InvalidInputError
from paged_engine.serving.errors import NoServerError, UpstreamError


class _Error(msgspec.Struct):
    message: str = ""
    param: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error


class TryAnotherError(UpstreamError):
    """This server cannot do it now; another may."""


@dataclass(slots=True)
class UpstreamCounters:
    """Attempts to have something done: ``attempts`` is the sum of the others and of those that go on."""

    attempts: int = 0
    answered: int = 0
    unreachable: int = 0
    busy: int = 0
    failed: int = 0
    refused: int = 0
    given_up: int = 0


class Servers:
    """Servers of one kind by name. Looks after their health from :meth:`watch`; asks them in turn."""

    def __init__(self, kind: str, urls: Mapping[str, str], *, connect_timeout_s: float) -> None:
        self.kind = kind
        self.counters = UpstreamCounters()
        self.ready: dict[str, bool] = dict.fromkeys(urls, False)
        self._urls = {name: url.rstrip("/") for name, url in urls.items()}
        self._turn = 0
        self._connect_timeout_s = connect_timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_s)
        connector = aiohttp.TCPConnector(limit=0)  # what is in flight is limited by the server
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=1 << 20)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def watch(self, pause_s: float) -> None:
        """Ask every server whether it is ready, again and again, until cancelled."""
        while True:
            await asyncio.gather(*(self._look(name) for name in self._urls))
            await asyncio.sleep(pause_s)

    def candidates(self, attempts_max: int) -> list[str]:
        """Whom to ask, in this order: ready ones in turn, then the others, which may have come back."""
        names = list(self._urls)
        start = self._turn % len(names)
        self._turn += 1
        turned = names[start:] + names[:start]
        turned.sort(key=lambda name: not self.ready[name])
        return turned[:attempts_max]

    @asynccontextmanager
    async def post(self, name: str, path: str, body: msgspec.Struct) -> AsyncIterator[aiohttp.ClientResponse]:
        """Ask one server; the answer has status 200 and its body is still to be read.

        Raises :class:`TryAnotherError` when another server may do better, :class:`UpstreamError` when none will, and
        :class:`InvalidInputError` when the server found fault with the request.
        """
        assert self._session is not None, "open() comes first"
        self.counters.attempts += 1
        outcome = "given_up"
        try:
            async with self._session.post(
                self._urls[name] + path,
                data=msgspec.json.encode(body),
                headers={"Content-Type": "application/json"},
            ) as response:
                if response.status != 200:
                    outcome = "busy" if response.status == 503 else "refused" if response.status < 500 else "failed"
                    await self._complain(name, response)
                outcome = "failed"
                yield response
                outcome = "answered"
        except (aiohttp.ClientError, OSError) as error:
            outcome = "unreachable"
            self.ready[name] = False
            raise TryAnotherError(f"{self.kind} {name}: {type(error).__name__}: {error}") from error
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "given_up"
            raise
        finally:
            setattr(self.counters, outcome, getattr(self.counters, outcome) + 1)

    async def tell(self, name: str, path: str, body: msgspec.Struct) -> None:
        """Tell a server something, once, whether it hears it or not."""
        assert self._session is not None, "open() comes first"
        try:
            async with (
                asyncio.timeout(self._connect_timeout_s),
                self._session.post(self._urls[name] + path, data=msgspec.json.encode(body)),
            ):
                pass
        except (aiohttp.ClientError, OSError, TimeoutError):
            self.ready[name] = False

    async def _complain(self, name: str, response: aiohttp.ClientResponse) -> None:
        text = await response.read()
        try:
            error = msgspec.json.decode(text, type=_ErrorBody).error
        except (msgspec.MsgspecError, UnicodeDecodeError):
            error = _Error(message=f"status {response.status}")
        said = f"{self.kind} {name}: {error.message}"
        if response.status == 400 and error.param and not error.param.startswith("kv_transfer"):
            field, _, rest = error.message.partition(": wanted ")
            wanted, _, got = rest.partition(", got ")
            raise InvalidInputError(field, wanted, got)
        if response.status >= 500:
            raise TryAnotherError(said)
        raise UpstreamError(said)

    async def _look(self, name: str) -> None:
        assert self._session is not None, "open() comes first"
        try:
            async with (
                asyncio.timeout(self._connect_timeout_s),
                self._session.get(self._urls[name] + "/readyz") as response,
            ):
                self.ready[name] = response.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            self.ready[name] = False


def nobody(kind: str, reasons: list[str]) -> NoServerError:
    return NoServerError(f"no {kind} server could do it: " + "; ".join(reasons))


__all__ = ["Servers", "TryAnotherError", "UpstreamCounters", "nobody"]
