"""In the place of a router of SGLang's that hands on ``return_routed_experts``: it speaks the protocol by which slime
adds, lists and removes engines, and hands every other request on as it is.

The package index's ``sglang-router`` 0.3.2 drops a field that it does not know, and with it all rows, without a word.
slime's image has a build of its own, which nobody else can install.
"""

from __future__ import annotations

import threading

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response


def started(port: int) -> None:
    """A thread that serves on this port of the local host until the process ends."""
    server = uvicorn.Server(uvicorn.Config(app(), host="127.0.0.1", port=port, log_level="error"))
    threading.Thread(target=server.run, daemon=True).start()


def app() -> FastAPI:
    between = FastAPI()
    engines: dict[str, str] = {}
    client = httpx.AsyncClient(timeout=None)  # noqa: S113 - an answer takes as long as it takes

    @between.post("/workers")
    async def add(request: Request) -> dict[str, str]:
        url = (await request.json())["url"]
        engines[str(len(engines))] = url
        return {"url": url}

    @between.get("/workers")
    async def listed() -> dict[str, list[dict[str, str]]]:
        return {"workers": [{"id": name, "url": url} for name, url in engines.items()]}

    @between.delete("/workers/{name}")
    async def remove(name: str) -> dict[str, str]:
        return {"url": engines.pop(name)}

    @between.post("/{path:path}")
    async def handed_on(path: str, request: Request) -> Response:
        (url,) = engines.values()
        told = {"Content-Type": "application/json"}
        answer = await client.post(f"{url}/{path}", content=await request.body(), headers=told)
        return Response(answer.content, answer.status_code, media_type="application/json")

    return between
