"""A server that answers as vLLM or SGLang does, with rows of a small model; faults can be planted in them."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

import numpy as np
import pybase64
import torch
from experts_seen import experts_of
from salted_moe import small_moe

EXPERTS, NEW = 16, 4


def none(rows: np.ndarray, _number: int, _earlier: list[np.ndarray]) -> np.ndarray:
    """No fault."""
    return rows


class Answering(Protocol):
    """What is served: JSON, text as it is, or ``None`` for a page that is not there."""

    def answer(self, path: str, asked: dict[str, Any]) -> Any: ...


class Engine:
    """Answers over a model of its own, whose rows go through ``fault``, called with each request's number."""

    def __init__(self, kind: str, fault: Any) -> None:
        self.kind, self.fault, self.model, self.lock = kind, fault, small_moe(0), threading.Lock()
        self.rows: list[np.ndarray] = []

    def answer(self, path: str, asked: dict[str, Any]) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": "small", "owned_by": self.kind}]}
        if path in ("/version", "/server_info"):
            return {"version": "1.2.3"}
        if path == "/metrics":
            return None
        prompt = asked["input_ids"] if self.kind == "sglang" else asked["prompt"]
        n = asked["sampling_params"].get("n", 1) if self.kind == "sglang" else asked.get("n", 1)
        with self.lock:
            completions = [self.completion(prompt, i) for i in range(n)]
        if self.kind == "sglang" and not asked["return_routed_experts"]:
            return [{"output_ids": new, "meta_info": {}} for new, _ in completions]
        if self.kind == "sglang":
            return [{"output_ids": new, "meta_info": {"routed_experts": rows}} for new, rows in completions]
        choices = [{"index": i, "token_ids": new, "routed_experts": r} for i, (new, r) in enumerate(completions)]
        if self.kind == "vllm":
            return {"id": "cmpl-1", "choices": choices, "prompt_token_ids": prompt}
        told = {"missing": {}, "error": {"0": "rows were not kept"}}
        return {"id": "cmpl-1", "choices": choices, "kv_transfer_params": {"kvroute": told}}

    def completion(self, prompt: list[int], index: int) -> tuple[list[int], str | None]:
        new = [(prompt[-1] + 7 * i + index) % 100 + 3 for i in range(NEW)]
        tokens = torch.tensor([[*prompt, *new][:-1]])
        rows = self.fault(experts_of(self.model, tokens).astype(np.int64), len(self.rows), self.rows)
        if rows is None:
            return new, None
        self.rows.append(rows)
        if self.kind == "sglang":
            return new, pybase64.b64encode_as_string(rows.astype("<i4").tobytes())
        np.save(file := io.BytesIO(), rows.astype(np.uint8))
        return new, pybase64.b64encode_as_string(file.getvalue())


@contextmanager
def serving(engine: Answering, cut: int = 0) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            answer = engine.answer(self.path, json.loads(self.rfile.read(length) or "{}"))
            content = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
            self.send_response(404 if answer is None else 200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) - cut])
            self.close_connection = True

        do_POST = do_GET  # noqa: N815 - the standard library's name

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
