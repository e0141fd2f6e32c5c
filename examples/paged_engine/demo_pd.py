"""``kvroute demo-pd``: the demo's conversations through prefill and decode, a process each.

Every row that comes back is judged against a run of one process that crossed nothing.
"""

from __future__ import annotations

import http.client
import json
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from cache_manager.errors import KVRouteError
from kvroute.routes import Routes
from paged_engine.bodies import DRAW
from paged_engine.demo import concluded
from paged_engine.driver import Driver, SampleId, rows_of, terminal
from paged_engine.findings import Crossed, Findings, Traffic
from paged_engine.options import Options
from paged_engine.processes import Pair
from paged_engine.request import FinishReason, Output, Request
from paged_engine.workload import ABORT_AFTER_TOKENS, Conversation, conversations


class DemoPD(Driver):
    """One run: serve, end, judge."""

    def __init__(self, options: Options, console: Console) -> None:
        super().__init__(options, console)
        self.outputs: dict[SampleId, Output] = {}
        self.gone: list[Request] = []

    def run(self) -> Findings:
        options = self.options
        config = options.engine
        sizes = {"--device-blocks": config.device_blocks, "--host-blocks": config.host_blocks}
        flags = {"--model": options.model, "--seed": options.seed, **sizes}
        with ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvroute-demo-pd-")))
            pair = stack.enter_context(Pair(directory, [str(each) for flag in flags.items() for each in flag]))
            stack.enter_context(self.progress)
            starting = self.tell("starting two processes", 1)
            pair.wait_ready()
            starting(1)
            tell = self.tell("serving", options.requests)
            asking = conversations(options.requests, options.seed)
            with ThreadPoolExecutor(len(asking)) as clients:
                list(clients.map(lambda each: self._talk(pair, each, lambda: tell(1)), asking))
            returned = pair.wait_quiet()
            prefill, decode = pair.prefill.counters(), pair.decode.counters()
            statuses = pair.end()
            tokens_match = self.plainly(self.outputs, watched=True, draw=DRAW)
            verdict = self.judge(self.outputs, rows_of)
        counts = Counter(prefill["traffic"]) + Counter(decode["traffic"])
        crossed = Crossed(
            **decode["decode"], clients_left=decode["http"]["left"], blocks_returned=returned, exit_statuses=statuses
        )
        return self.found(
            "kvroute demo-pd",
            *(self.outputs, verdict, Traffic(**counts)),
            gone=len(self.gone),
            store="none",
            tokens_match=tokens_match,
            crossed=crossed,
        )

    def _talk(self, pair: Pair, conversation: Conversation, tell: Callable[[], None]) -> None:
        """One client, in a thread of its own: each turn when the one before was answered."""
        while not conversation.done:
            request = conversation.ask()
            body = {
                "prompt": list(request.prompt),
                "max_tokens": request.max_tokens,
                "temperature": request.temperature,
                "seed": request.seed,
                "n": request.n,
                "return_routed_experts": True,
            }
            if conversation.gives_up(request):
                _go_away(pair, body)
                self.gone.append(request)
                tell()
                return
            status, answer = pair.complete(body)
            if status != 200:
                raise KVRouteError(f"{request.id}: status {status}: {answer.get('error')}")
            for choice in answer["choices"]:
                self.outputs[request.id, choice["index"]] = _output(request, choice)
            conversation.hear(self.outputs[request.id, 0])
            tell()


def _output(request: Request, choice: dict[str, Any]) -> Output:
    tokens, reason = tuple(choice["token_ids"]), FinishReason(choice["finish_reason"])
    return Output(request, choice["index"], tokens, reason, Routes.from_json(choice["routed_experts"]))


def _go_away(pair: Pair, body: dict[str, Any]) -> None:
    """Close the connection in the middle of the answer."""
    _, handover = pair.prefill.ask("/v1/completions", body)
    connection = http.client.HTTPConnection(urlsplit(pair.decode.url).netloc, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True, "handover": handover}))
    answer, generated = connection.getresponse(), 0
    while generated < ABORT_AFTER_TOKENS and (line := answer.readline()):
        if line.startswith(b"data: {"):
            generated += sum(len(choice["token_ids"]) for choice in json.loads(line[6:])["choices"])
    answer.close()
    connection.close()


def demo_pd(options: Options, console: Console) -> int:
    """Run the demo, print its summary, write the JSON; the exit status."""
    options.prepare()
    console.print(
        f"{options.model}, a small model with weights of seed {options.seed}: {options.requests} requests through "
        f"prefill and decode, two processes on loopback, {options.engine.device_blocks} device blocks each"
    )
    findings = DemoPD(options, console).run()
    console.print(findings.table())
    return concluded(findings, options, console)


def main(**flags: Any) -> int:
    """``kvroute demo-pd``."""
    return demo_pd(Options(**flags), terminal())


__all__ = ["DemoPD", "demo_pd", "main"]
