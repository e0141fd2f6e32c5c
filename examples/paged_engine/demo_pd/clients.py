"""The demo's conversations over HTTP: all at once, each turn when the one before was answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, Final

import aiohttp

from cache_manager.errors import KVRouteError
from kvroute.routes import Routes
from paged_engine.demo.serve import SampleId
from paged_engine.demo.workload import ABORT_AFTER_TOKENS, Conversation
from paged_engine.engine.request import FinishReason, Output, Request

REQUEST_S: Final = 300.0


class AnswerError(KVRouteError):
    """The front answered a request of the demo with an error."""


class HttpClients:
    """Talks to a front until every conversation has ended; ``outputs`` are what came back, ``gone`` who went away."""

    def __init__(self, url: str, model: str, conversations: list[Conversation]) -> None:
        self._url = url + "/v1/completions"
        self._model = model
        self._conversations = conversations
        self.outputs: dict[SampleId, Output] = {}
        self.gone: list[Request] = []

    def run(self, tell: Callable[[int], None]) -> None:
        """Do it all; ``tell`` hears of every request that has ended."""
        asyncio.run(self._run(tell))

    async def _run(self, tell: Callable[[int], None]) -> None:
        timeout = aiohttp.ClientTimeout(total=REQUEST_S)
        async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as group:
            for conversation in self._conversations:
                group.create_task(self._talk(session, conversation, tell))

    async def _talk(
        self, session: aiohttp.ClientSession, conversation: Conversation, tell: Callable[[int], None]
    ) -> None:
        while not conversation.done:
            request = conversation.ask()
            if conversation.gives_up(request):
                await self._go_away(session, request)
                self.gone.append(request)
                tell(1)
                return
            for output in await self._answer(session, request):
                self.outputs[request.id, output.sample] = output
            conversation.hear(self.outputs[request.id, 0])
            tell(1)

    async def _answer(self, session: aiohttp.ClientSession, request: Request) -> list[Output]:
        async with session.post(self._url, json=self._body(request)) as response:
            body = await response.json()
        if response.status != 200:
            raise AnswerError(f"{request.id}: status {response.status}: {body['error']['message']}")
        return [
            Output(
                request,
                choice["index"],
                tuple(choice["token_ids"]),
                FinishReason(choice["finish_reason"]),
                Routes.from_json(choice["routed_experts"]),
            )
            for choice in body["choices"]
        ]

    async def _go_away(self, session: aiohttp.ClientSession, request: Request) -> None:
        """Close the connection in the middle of the answer."""
        generated = 0
        async with session.post(self._url, json={**self._body(request), "stream": True}) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line.removeprefix(b"data: "))
                    generated += sum(len(choice["token_ids"]) for choice in event["choices"])
                if generated >= ABORT_AFTER_TOKENS:
                    response.close()
                    return

    def _body(self, request: Request) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": list(request.prompt),
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "n": request.n,
            "return_routed_experts": True,
        }


__all__ = ["AnswerError", "HttpClients"]
