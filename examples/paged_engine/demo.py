"""``kvroute demo``: an engine under pressure, restarted from its store, and a judge of every row that it returned.

``kvroute demo-pd``: the same conversations through prefill and decode, in two processes.

At the end of the first the weights change while answers are being generated, as when training updates weights during a
rollout. Every unfinished sequence loses its KV and is computed again by the new weights, whose routers choose other
experts for the same tokens; then it goes on. The judge knows which row of each position was computed first.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TextIO

import torch
from torch import nn

from cache_manager.errors import ConfigError, KVRouteError, StorageError
from cache_manager.keys import Namespace
from cache_manager.storage import open_store
from kvroute.routes import Routes
from paged_engine import text
from paged_engine.engine import Engine
from paged_engine.judge import Checker, SecondRun, Verdict
from paged_engine.models import build_model, weights_digest
from paged_engine.pool import running_pool
from paged_engine.processes import Pair
from paged_engine.request import EngineConfig, FinishReason, Output
from paged_engine.scheduler import Work
from paged_engine.workload import ABORT_AFTER_TOKENS, Conversation, conversations, longest_tokens

UPDATED_MAX: Final = 6
"""Conversations during which the weights change."""
UPDATE_AFTER_TOKENS: Final = 8
"""The update comes when the first answer has this many tokens."""
NONE: Final = ("rows_wrong", "rows_missing", "update_rows_wrong", "update_rows_missing")
TRUE: Final = ("tokens_match", "blocks_returned", "transferred_rows")
"""Findings that fail a run unless they are zero, or true."""
SampleId = tuple[str, int]
"""Request id and the number of the sample."""
Outputs = Mapping[SampleId, Output]
MOONCAKE: Final = "mooncake"
"""In place of a store's URL: a Mooncake pool that the demo starts and ends."""


@dataclass(frozen=True, slots=True)
class Options:
    """The flags of ``kvroute demo`` (``demo-pd`` has some of them); ``None`` means that the demo chooses.

    By default the device has room for a quarter of the conversations at their longest, but at least one and a quarter
    and at most three; the host has the same. That is less than the running sequences need. ``store`` is a URL or
    ``MOONCAKE``. Model and KV are on ``device``; on ``cuda`` one launch a pass captures the rows. With
    ``transfer_process`` the cache-transfer process copies KV.

    Raises :class:`ConfigError` naming the flag.
    """

    seed: int = 0
    requests: int = 96
    device_blocks: int | None = None
    host_blocks: int | None = None
    model: str = "qwen3_moe"
    store: str | None = None
    device: str = "cpu"
    transfer_process: bool = False
    json: Path | None = None

    def __post_init__(self) -> None:
        if self.device == "cuda" and not torch.cuda.device_count():
            raise ConfigError("--device", "cpu, for torch sees no CUDA GPU here", self.device)
        if self.device != "cpu" and self.transfer_process:
            raise ConfigError("--transfer-process", "--device cpu: it copies SharedMemory", self.device)
        if self.engine.device_blocks < (longest := self._longest_blocks):
            raise ConfigError("--device-blocks", f"at least {longest}, for the longest sequence", self.device_blocks)

    @property
    def _longest_blocks(self) -> int:
        return -(-longest_tokens(conversations(self.requests, self.seed)) // EngineConfig().block_tokens)

    @property
    def engine(self) -> EngineConfig:
        """The configuration of the engine under test."""
        clients = len(conversations(self.requests, self.seed))
        room = round(self._longest_blocks * max(1.25, min(3.0, clients / 4)))
        device = room if self.device_blocks is None else self.device_blocks
        host = device if self.host_blocks is None else self.host_blocks
        return EngineConfig(device_blocks=device, host_blocks=host, transfer_process=self.transfer_process)


class Driver:
    """Shared by both demos: the model, the judgement, a line for each stage."""

    title = ""

    def __init__(self, options: Options, out: TextIO | None = None) -> None:
        torch.set_num_threads(1)  # more would wait for each other: the matrices are small
        self.options, self.checker, self._out = options, Checker(), out or sys.stdout
        self._started_s, blocks = time.perf_counter(), options.engine
        self.say(
            f"{self.title}: {options.requests} requests in conversations, on {blocks.device_blocks} device and "
            f"{blocks.host_blocks} host blocks of {blocks.block_tokens} tokens; {options.model}, a small model with "
            f"weights of seed {options.seed}"
        )

    def say(self, what: str) -> None:
        self._out.write(f"{time.perf_counter() - self._started_s:6.1f} s  {what}\n")
        self._out.flush()

    def build(self) -> Any:
        model: Any = build_model(self.options.model, seed=self.options.seed, vocab_size=text.VOCAB_SIZE)
        return model.to(self.options.device)

    def judge(self, outputs: Outputs) -> Verdict:
        """Judge every token and row."""
        self.say(f"judging {len(outputs)} samples, each of which transformers runs once more")
        second_run = SecondRun(self.build())
        return sum((self.checker.judge(output, second_run) for output in outputs.values()), Verdict())

    def conclude(self, outputs: Outputs, verdict: Verdict, more: Mapping[str, Any], *, gone: int = 0) -> int:
        """Print the findings, and write them; the exit status. ``gone`` requests of one sample got no answer."""
        options, aborted = self.options, sum(output.reason is FinishReason.ABORT for output in outputs.values())
        found = {
            "title": self.title,
            "model": options.model,
            "seed": options.seed,
            "requests": len({request for request, _ in outputs}) + gone,
            "samples": len(outputs) + gone,
            "aborted": aborted + gone,
            "tokens": sum(len(output.tokens) for output in outputs.values()),
            **asdict(verdict),
            "tokens_match": not verdict.answers_wrong,
            "recompute_agreement": verdict.agreement,
            "device_blocks": options.engine.device_blocks,
            "host_blocks": options.engine.host_blocks,
            "seconds": round(time.perf_counter() - self._started_s, 2),
            **more,
        }
        wrong = failing(found)
        self._out.write(table(found, wrong))
        if options.json is not None:
            options.json.write_text(json.dumps({**found, "ok": not wrong}, indent=2) + "\n")
            self.say(f"numbers: {options.json}")
        self.say("FAILED: see the table" if wrong else "every row is right")
        return 1 if wrong else 0


@dataclass(slots=True)
class Clients:
    """The engine's observer, and its clients: what they are waiting for and what they got.

    The observer shows every pass to the checker, and plays the impatient clients: they disconnect while a pass computes
    for them, whose rows must not reach a block that has lost its owner meanwhile.
    """

    conversations: list[Conversation]
    checker: Checker
    outputs: dict[SampleId, Output] = field(default_factory=dict)
    _asked: dict[str, Conversation] = field(default_factory=dict)
    _engine: Engine | None = None

    def serve(self, engine: Engine, turns: Callable[[Conversation], int]) -> None:
        """Run every conversation until it has had ``turns(conversation)`` turns, then return with the engine idle."""
        self._engine, asking = engine, self.conversations
        while asking or engine.busy:
            for conversation in asking:
                if conversation.turn < turns(conversation):
                    request = conversation.ask()
                    self._asked[request.id] = conversation
                    engine.add(request)
            asking = []
            for output in engine.step():
                request = output.request
                self.outputs[request.id, output.sample] = output
                if all((request.id, sample) in self.outputs for sample in range(request.n)):
                    conversation = self._asked.pop(request.id)
                    conversation.hear(self.outputs[request.id, 0])
                    asking.append(conversation)
        self._engine = None

    @contextmanager
    def observe(self, work: list[Work]) -> Iterator[None]:
        with self.checker.observe(work):
            yield
        for sequence, _, stop in work:
            request = sequence.request
            impatient = self._asked[request.id].gives_up and stop - len(request.prompt) >= ABORT_AFTER_TOKENS
            if impatient and self._engine is not None:
                self._engine.abort(request.id)


class Demo(Driver):
    """The verdict is the same for the same options; the traffic depends on when the store answers."""

    title = "kvroute demo"

    def run(self) -> int:
        """The exit status."""
        options, clients = self.options, conversations(self.options.requests, self.options.seed)
        self.clients = Clients(clients, self.checker)
        with ExitStack() as stack:
            url = options.store
            if url == MOONCAKE:
                pool = stack.enter_context(running_pool())
                url = pool.url
                self.say(f"Mooncake: master is process {pool.master_pid}, process {pool.owner_pid} lends the memory")
            elif url is None:
                url = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvroute-store-"))).as_uri()
            traffic = Counter(self._serve(url, "before restart", lambda c: (len(c.questions) + 1) // 2))
            self.say("engine stopped; model, KV and rows dropped from memory; only the store is left")
            gc.collect()
            traffic.update(self._serve(url, "after restart", lambda c: len(c.questions)))
            verdict = self.judge(self.clients.outputs)
            found = {**traffic, "store": url, **self._across_update()}
        return self.conclude(self.clients.outputs, verdict, found)

    def _serve(self, url: str, title: str, turns: Callable[[Conversation], int]) -> dict[str, int]:
        """One life of the engine: everything but the store and the checker is new, and is dropped at the end."""
        self.say(f"serving {title}")
        model, clients = self.build(), self.clients
        namespace = Namespace(f"{self.options.model}/{weights_digest(model)}", weights_version=0)
        store = open_store(url)
        try:
            with (
                self.checker.watching(model),
                Engine(model, self.options.engine, namespace, store=store, observer=clients.observe) as engine,
            ):
                clients.serve(engine, turns)
                engine.drain()
                return engine.traffic()
        finally:
            with suppress(StorageError):  # a failed store costs only time, and is counted
                store.flush()
            store.close()

    def _across_update(self) -> dict[str, int]:
        """Let some clients ask once, change the routers meanwhile, and judge the answers."""
        options, model, checker, outputs = self.options, self.build(), Checker(), list[Output]()
        asking = conversations(options.requests, options.seed)[:UPDATED_MAX]
        self.say("changing the weights during answers")
        namespace = Namespace("across an update", weights_version=0)
        with checker.watching(model), Engine(model, options.engine, namespace, observer=checker.observe) as engine:
            for client in asking:
                engine.add(client.ask())
            while engine.busy:
                answers = [len(sequence.generated) for sequence in engine.scheduler.unfinished]
                if not engine.aux.namespace.weights_version and max(answers, default=0) >= UPDATE_AFTER_TOKENS:
                    move_routers(model, seed=1)
                    engine.reset(weights_version=1)
                    checker.weights_changed()
                outputs += engine.step()
        verdict = sum(map(checker.judge, outputs), Verdict())
        return {
            "update_samples": sum(len(output.routes.weights_versions) > 1 for output in outputs),
            "update_rows_expected": verdict.rows_expected,
            "update_rows_wrong": verdict.rows_wrong,
            "update_rows_missing": verdict.rows_missing,
            "update_rows_recomputed": len(checker.computed_differently),
        }


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
            verdict = self.judge(outputs)
        more = {name: count + prefill["traffic"][name] for name, count in decode["traffic"].items()} | decode["decode"]
        more |= {"store": "none", "clients_left": decode["http"]["left"]}
        more |= {"blocks_returned": returned, "exit_statuses": statuses}
        return self.conclude(outputs, verdict, more, gone=gone)


def _talk(pair: Pair, conversation: Conversation, outputs: dict[SampleId, Output]) -> bool:
    """One client, in its own thread: each turn when the one before was answered. Returns whether it disconnected."""
    for _ in conversation.questions:
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
    with pair.decode.open("/v1/completions", body | {"stream": True, "handover": handover}) as answer:
        generated = 0
        while generated < ABORT_AFTER_TOKENS and (line := answer.readline()):
            if line.startswith(b"data: {"):
                generated += sum(len(choice["token_ids"]) for choice in json.loads(line[6:])["choices"])


def move_routers(model: nn.Module, seed: int) -> None:
    """Add noise of the weights' own deviation to every router, so that most tokens change experts."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            for weight in module.parameters(recurse=False) if "Router" in type(module).__name__ else ():
                noise = torch.randn(weight.shape, generator=draw, dtype=weight.dtype).to(weight.device)
                weight.add_(weight.std() * noise)


def failing(found: Mapping[str, Any]) -> set[str]:
    """The findings that fail the run: wrong or missing rows, wrong tokens, blocks not freed, a process that failed."""
    wrong = {name for name in NONE if found.get(name)} | {name for name in TRUE if not found.get(name, True)}
    return wrong | ({"exit_statuses"} if any(found.get("exit_statuses", ())) else set())


def table(found: Mapping[str, Any], wrong: set[str]) -> str:
    """Lines of a name and a value; those that are ``wrong`` are marked."""
    lines = [f"{found['title']}: {found['model']}"]
    for name, value in list(found.items())[2:]:
        lines.append(f"  {name:28} {value:,}" if type(value) is int else f"  {name:28} {value}")
        lines[-1] += "   <-- WRONG" if name in wrong else ""
    return "\n".join(lines) + "\n"


def main(kind: type[Demo | DemoPD] = Demo, **flags: Any) -> int:
    """``kvroute demo``; the exit status."""
    return kind(Options(**flags)).run()


main_pd = partial(main, DemoPD)
