"""``kvroute demo-pd``: the demo's conversations through prefill and decode, in two processes.

Every row returned is judged against a run in one process, without transfers.
"""

from __future__ import annotations

import http.client
import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cache_manager.errors import KVRouteError
from kvroute.routes import Routes
from paged_engine.bodies import DRAW
from paged_engine.demo import Driver, SampleId
from paged_engine.options import Options
from paged_engine.processes import Pair
from paged_engine.request import FinishReason, Output
from paged_engine.workload import ABORT_AFTER_TOKENS, Conversation, conversations


class DemoPD(Driver):
    """One run: serve, end, judge."""

    title = "kvroute demo-pd"

    def run(self) -> int:
        """The exit status."""
        options, outputs = self.options, dict[SampleId, Output]()
        sizes = {"--device-blocks": options.engine.device_blocks, "--host-blocks": options.engine.host_blocks}
        flags = {"--model": options.model, "--seed": options.seed, **sizes}
        with ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvroute-demo-pd-")))
            pair = stack.enter_context(Pair(directory, [str(each) for flag in flags.items() for each in flag]))
            self.say("starting two processes")
            pair.wait_ready()
            self.say("serving")
            asking = conversations(options.requests, options.seed)
            with ThreadPoolExecutor(len(asking)) as clients:
                gone = sum(clients.map(lambda each: _talk(pair, each, outputs), asking))
            returned = pair.wait_quiet()
            prefill, decode = pair.prefill.counters(), pair.decode.counters()
            statuses = pair.end()
            tokens_match = self.plainly(outputs, watched=True, draw=DRAW)
            verdict = self.judge(outputs, {})
        more = {name: count + prefill["traffic"][name] for name, count in decode["traffic"].items()} | decode["decode"]
        more |= {"store": "none", "tokens_match": tokens_match, "clients_left": decode["http"]["left"]}
        more |= {"blocks_returned": returned, "exit_statuses": statuses}
        return self.conclude(outputs, verdict, more, gone=gone)


def _talk(pair: Pair, conversation: Conversation, outputs: dict[SampleId, Output]) -> bool:
    """One client, in its own thread: each turn when the one before was answered. Returns whether it disconnected."""
    while not conversation.done:
        request = conversation.ask()
        asked = {name: getattr(request, name) for name in ("prompt", "max_tokens", "temperature", "seed", "n")}
        body = asked | {"return_routed_experts": True}
        if conversation.gives_up:
            _go_away(pair, body)
            return True
        status, answer = pair.complete(body)
        if status != 200:
            raise KVRouteError(f"{request.id}: status {status}: {answer.get('error')}")
        for choice in answer["choices"]:
            tokens, reason = tuple(choice["token_ids"]), FinishReason(choice["finish_reason"])
            routes = Routes.from_json(choice["routed_experts"])
            outputs[request.id, choice["index"]] = Output(request, choice["index"], tokens, reason, routes)
        conversation.hear(outputs[request.id, 0])
    return False


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


def main(**flags: Any) -> int:
    """``kvroute demo-pd``; the exit status."""
    return DemoPD(Options(**flags)).run()
