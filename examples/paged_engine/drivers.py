"""``kvroute demo``: an engine under pressure, restarted from its store, and a judge of every row that it returned.

``kvroute demo-pd``: the same conversations through prefill and decode, in two processes.

At the end of the first the weights change while answers are being generated, as when training updates weights during a
rollout. Every unfinished sequence loses its KV and is computed again by the new weights, whose routers choose other
experts for the same tokens; then it goes on. The judge knows which row of each position was computed first.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from cache_manager.errors import ConfigError, KVRouteError, StorageError
from cache_manager.keys import Namespace
from cache_manager.progress import Progress
from cache_manager.storage import open_store
from kvroute.findings import STDOUT, write_json
from kvroute.routes import Routes
from paged_engine import text
from paged_engine.beside import Beside, whence
from paged_engine.engine import Engine
from paged_engine.judge import Checker, SecondRun, Verdict
from paged_engine.models import build_model, weights_digest
from paged_engine.options import MOONCAKE, Options
from paged_engine.pool import running_pool
from paged_engine.processes import Pair
from paged_engine.request import FinishReason, Output
from paged_engine.scheduler import Work
from paged_engine.workload import ABORT_AFTER_TOKENS, Conversation, conversations

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
TEMPORARY: Final = "a temporary directory, removed"


class Driver:
    """Shared by both demos: the model, the judgement, a line for each stage. Raises :class:`ConfigError` for no GPU."""

    title = ""

    def __init__(self, options: Options, progress: Progress | None = None) -> None:
        if options.device == "cuda" and not torch.cuda.device_count():
            raise ConfigError("--device", "cpu, for torch sees no CUDA GPU here", options.device)
        torch.set_num_threads(1)  # more would wait for each other: the matrices are small
        self.options, self.checker, self.progress = options, Checker(), progress or Progress()

    def say(self, what: str) -> None:
        self.progress.print(f"{self.progress.seconds:6.1f} s  {what}\n")

    def build(self) -> Any:
        model: Any = build_model(self.options.model, seed=self.options.seed, vocab_size=text.VOCAB_SIZE)
        return model.to(self.options.device)

    def judge(self, outputs: Outputs, by_slot: Mapping[SampleId, NDArray[np.int32]] | None = None) -> Verdict:
        """Judge every token and row; and those of the same tokens that a buffer keyed by slot has."""
        self.say(f"judging {len(outputs)} samples, each of which transformers runs once more")
        second_run = SecondRun(self.build())
        verdict = Verdict()
        for number, (sample, output) in enumerate(outputs.items()):
            self.progress.say(f"judging: {number}/{len(outputs)} samples, {verdict.rows_expected:,} rows")
            verdict += self.checker.judge(output, second_run, (by_slot or {}).get(sample))
        self.progress.say("")
        return verdict

    def conclude(
        self,
        outputs: Outputs,
        verdict: Verdict,
        more: Mapping[str, Any],
        *,
        gone: int = 0,
        pictures: Sequence[str] = (),
    ) -> int:
        """Print the findings in words, then ``pictures``, and write the counters; the exit status. ``gone`` requests of
        one sample got no answer."""
        options, aborted = self.options, sum(output.reason is FinishReason.ABORT for output in outputs.values())
        findings = {
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
            "seconds": round(self.progress.seconds, 2),
            **more,
        }
        wrong = failing(findings)
        self.progress.print("\n".join([*summary(findings), *pictures, *(f"WRONG: {each}" for each in wrong), ""]))
        write_json(options.json, json.dumps({**findings, "ok": not wrong}, indent=2) + "\n")
        if options.json not in (None, STDOUT):
            self.say(f"counters: {options.json}")
        self.say("FAILED" if wrong else "every row is right")
        return 1 if wrong else 0


@dataclass(slots=True)
class Clients:
    """The engine's observer, and its clients: what they are waiting for and what they got.

    The observer shows every pass to the checker, and plays the impatient clients: they disconnect while a pass computes
    for them, whose rows must not reach a block that has lost its owner meanwhile.
    """

    conversations: list[Conversation]
    checker: Checker
    progress: Progress
    beside: Beside
    outputs: dict[SampleId, Output] = field(default_factory=dict)
    _asked: dict[str, Conversation] = field(default_factory=dict)
    _engine: Engine | None = None

    def serve(self, engine: Engine, turns: Callable[[Conversation], int]) -> None:
        """Run every conversation until it has had ``turns(conversation)`` turns, then return with the engine idle."""
        self._engine, asking = engine, self.conversations
        self.beside.begin(engine)
        every = sum(len(conversation.questions) for conversation in self.conversations)
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
                self.beside.ended(output)
                if all((request.id, sample) in self.outputs for sample in range(request.n)):
                    conversation = self._asked.pop(request.id)
                    conversation.hear(self.outputs[request.id, 0])
                    asking.append(conversation)
            answered = sum(conversation.turn for conversation in self.conversations)
            rows = sum(len(output.routes.ids) for output in self.outputs.values())
            self.progress.say(f"{answered}/{every} requests, {rows:,} rows")
        self.progress.say("")
        self._engine = None

    @contextmanager
    def observe(self, work: list[Work]) -> Iterator[None]:
        self.beside.about_to(work)
        with self.checker.observe(work):
            yield
        self.beside.passed(work, self.checker.routed)
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
        self.beside = Beside(options.engine.block_tokens)
        self.clients = Clients(clients, self.checker, self.progress, self.beside)
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
            verdict = self.judge(self.clients.outputs, self.beside.by_slot)
            more = {**traffic, "store": options.store or TEMPORARY, **self._across_update()}
            more["came_from"] = {kind.name.lower(): count for kind, count in self.beside.came_from.items()}
        told = [] if self.beside.told is None else ["", *self.beside.told.lines()]
        pictures = ["", *whence(self.beside.came_from), *told, ""]
        return self.conclude(self.clients.outputs, verdict, more, pictures=pictures)

    def _serve(self, url: str, title: str, turns: Callable[[Conversation], int]) -> dict[str, int]:
        """One life of the engine: everything but the store and the checker is new, and is dropped at the end."""
        self.say(f"serving {title}")
        self.progress.say("building the model")
        model, clients = self.build(), self.clients
        namespace = Namespace(f"{self.options.model}/{weights_digest(model)}", weights_version=0)
        store = open_store(url)
        try:
            with (
                self.checker.watching(model),
                Engine(
                    model,
                    self.options.engine,
                    namespace,
                    store=store,
                    observer=clients.observe,
                    around=self.beside.watch,
                ) as engine,
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
            pair = stack.enter_context(Pair(directory, [str(word) for flag in flags.items() for word in flag]))
            self.say("starting two processes")
            self.progress.say("waiting for prefill and decode: each imports torch and builds the model")
            pair.wait_ready()
            self.say("serving")
            asking = conversations(options.requests, options.seed)
            with ThreadPoolExecutor(len(asking)) as clients:
                gone = sum(clients.map(lambda client: self._talk(pair, client, outputs), asking))
            self.progress.say("")
            returned = pair.wait_quiet()
            prefill, decode = pair.prefill.counters(), pair.decode.counters()
            statuses = pair.end()
            verdict = self.judge(outputs)
        more = {name: count + prefill["traffic"][name] for name, count in decode["traffic"].items()} | decode["decode"]
        more |= {"store": "none", "clients_left": decode["http"]["left"]}
        more |= {"blocks_returned": returned, "exit_statuses": statuses}
        return self.conclude(outputs, verdict, more, gone=gone)

    def _talk(self, pair: Pair, conversation: Conversation, outputs: dict[SampleId, Output]) -> bool:
        """One client, in its own thread: each turn when the one before was answered. Returns whether it disconnected.

        Raises ``ServerError`` for a process that has ended, with what it last said, and :class:`KVRouteError` for a
        request without an answer.
        """
        for _ in conversation.questions:
            request = conversation.ask()
            asked = {name: getattr(request, name) for name in ("prompt", "max_tokens", "temperature", "seed", "n")}
            body = asked | {"return_routed_experts": True}
            if conversation.gives_up:
                _go_away(pair, body)
                return True
            status, answer = pair.complete(body)
            if status != 200:
                pair.check()
                raise KVRouteError(f"{request.id}: status {status}: {answer.get('error')}")
            for choice in answer["choices"]:
                tokens, reason = tuple(choice["token_ids"]), FinishReason(choice["finish_reason"])
                routes = Routes.from_json(choice["routed_experts"])
                outputs[request.id, choice["index"]] = Output(request, choice["index"], tokens, reason, routes)
            conversation.hear(outputs[request.id, 0])
            samples = list(outputs.values())  # of every client so far
            rows = sum(len(output.routes.ids) for output in samples)
            answered = len({output.request.id for output in samples})
            self.progress.say(f"{answered}/{self.options.requests} requests, {rows:,} rows")
        return False


def _go_away(pair: Pair, body: dict[str, Any]) -> None:
    """Close the connection in the middle of the answer."""
    _, handover = pair.prefill.ask("/v1/completions", body)
    try:
        stream = pair.decode.open("/v1/completions", body | {"stream": True, "handover": handover})
    except OSError as error:
        pair.check()
        raise KVRouteError(f"decode: wanted an answer, got {error}") from error
    with stream as answer:
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


def summary(findings: Mapping[str, Any]) -> list[str]:
    """What came out, in sentences; ``--json`` has the counters."""
    count = {name: f"{value:,}" for name, value in findings.items() if type(value) is int}
    tokens = "the ones" if findings["tokens_match"] else f"not the ones, in {count['answers_wrong']} samples,"
    expected, updated = count["rows_expected"], count.get("update_rows_expected")
    lines = [
        f"{count['requests']} requests, {count['samples']} samples, {count['aborted']} of them left by their clients",
        f"their {count['tokens']} tokens are {tokens} that transformers alone samples",
        f"kvroute: {count['rows_wrong']} of {expected} rows wrong, {count['rows_missing']} missing",
    ]
    if "came_from" in findings:
        lines.append(f"a buffer keyed by slot, in the same passes: {count['slot_rows_wrong']} of {expected} rows wrong")
    if updated is not None:
        lines += [
            f"{count['update_samples']} answers went on across a change of the weights",
            f"kvroute: {count['update_rows_wrong']} of {updated} rows wrong, {count['update_rows_missing']} missing",
        ]
    if "transferred_rows" in findings:
        blocks = count["transferred_blocks"]
        lines.append(f"{count['transferred_rows']} rows crossed from prefill to decode, in {blocks} blocks")
    return lines
