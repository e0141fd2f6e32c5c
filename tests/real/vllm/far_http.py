"""Engines of ``far_start`` behind HTTP, as much of vLLM's server as ``kvroute doctor`` asks."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from far_start import Engine, ask

from kvroute.verify.asking import exchanged


class Behind:
    """The engine of a role, which starts when it is first asked; one request at a time."""

    def __init__(self, engine: Callable[[], Engine], name: str) -> None:
        self._engine, self._name, self._asked, self._lock = engine, name, 0, threading.Lock()

    def answer(self, path: str, asked: dict[str, Any]) -> Any:
        with self._lock:
            engine = self._engine()
            if path == "/v1/models":
                return {"data": [{"id": "tiny", "owned_by": "vllm"}]}
            if path == "/version":
                return {"version": engine.peer.version}
            if path == "/metrics":
                counted = engine.peer.ask({"counters": True})
                return "".join(f"{name}_total {value}\n" for name, value in counted.items() if "by_source" not in name)
            self._asked += 1
            params = asked.get("kv_transfer_params")
            more = {"extra_args": {"kv_transfer_params": params}} if params else {}
            request = ask(f"{self._name}-{self._asked}", asked["prompt"], max_tokens=asked["max_tokens"], **more)
            (answer,) = engine.do([request])
        choices = [{"index": 0, "token_ids": answer["completions"][0]["tokens"]}]
        whole = {"id": answer["id"], "object": "text_completion", "usage": {}, "choices": choices}
        return whole | {"prompt_token_ids": answer["prompt"], "kv_transfer_params": answer["params"]}


class Proxy:
    """Asks prefill, and then decode with what prefill's answer says, unless it ``drops`` that."""

    def __init__(self, prefill: str, decode: str, give: dict[str, Any], *, drops: bool) -> None:
        self._prefill, self._decode, self._give, self._drops = prefill, decode, give, drops

    def answer(self, path: str, asked: dict[str, Any]) -> Any:
        lent = {**asked, "max_tokens": 1, "kv_transfer_params": self._give}
        params = json.loads(exchanged(self._prefill + path, lent))["kv_transfer_params"]
        more = {} if self._drops else {"kv_transfer_params": params}
        return json.loads(exchanged(self._decode + path, {**asked, **more}))
