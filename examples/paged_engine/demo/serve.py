"""Clients that talk to an engine until each has had its turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paged_engine.demo.checker import Checker
from paged_engine.demo.workload import ABORT_AFTER_TOKENS, Conversation
from paged_engine.engine.engine import Engine, Span
from paged_engine.engine.request import FinishReason, Output, Request
from paged_engine.engine.sequence import State

SampleId = tuple[str, int]
"""Request id and the number of the sample."""


@dataclass(slots=True)
class Clients:
    """The conversations, what they are waiting for and what they got."""

    conversations: list[Conversation]
    outputs: dict[SampleId, Output] = field(default_factory=dict)
    asked: dict[str, tuple[Conversation, Request]] = field(default_factory=dict)

    def serve(self, engine: Engine, turns: Callable[[Conversation], int], tell: Callable[[int, str], None]) -> None:
        """Let every conversation go on until it has had ``turns`` of it, then return with the engine idle.

        ``tell`` hears after every step how many requests have been answered in it, and how the engine is doing:
        sequences by state, and device blocks that are free or can be evicted.
        """
        for conversation in self.conversations:
            self._ask(engine, conversation, turns)
        while engine.busy:
            answered = 0
            for output in engine.step():
                self.outputs[output.request.id, output.sample] = output
                conversation, request = self.asked[output.request.id]
                if all((request.id, sample) in self.outputs for sample in range(request.n)):
                    answered += 1
                    del self.asked[request.id]
                    conversation.hear(self.outputs[request.id, 0])
                    self._ask(engine, conversation, turns)
            tell(answered, _status(engine))

    def _ask(self, engine: Engine, conversation: Conversation, turns: Callable[[Conversation], int]) -> None:
        if conversation.turn < turns(conversation):
            request = conversation.ask()
            self.asked[request.id] = conversation, request
            engine.add(request)


@dataclass(slots=True)
class Watcher:
    """The engine's observer: shows every pass to the checker, and plays the clients that do not wait.

    Those go away while a forward pass computes for them: the rows of that pass must not reach a block that has lost
    its owner meanwhile. ``expected`` says how many rows they should have got: those of the passes before.
    """

    checker: Checker
    clients: Clients
    engine: Engine | None = None
    spans: tuple[Span, ...] = ()
    expected: dict[SampleId, int] = field(default_factory=dict)

    def begin(self, spans: Sequence[Span]) -> None:
        self.spans = tuple(spans)
        self.checker.begin(spans)

    def end(self) -> None:
        self.checker.end()
        for conversation, request in list(self.clients.asked.values()):
            if not conversation.gives_up(request):
                continue
            for span in self.spans:
                generated = len(span.tokens) - len(request.prompt)
                if span.owner == f"{request.id}#0" and generated >= ABORT_AFTER_TOKENS and self.engine is not None:
                    self.expected[request.id, 0] = span.start
                    self.engine.abort(request.id)

    def rows_expected(self, output: Output) -> int:
        """How many rows a sample should come with: the last sampled token has none."""
        if output.reason is FinishReason.ABORT:
            return self.expected[output.request.id, output.sample]
        return len(output.sequence) - 1


def same_tokens(output: Output, plain: Output) -> bool:
    """Whether the plain engine generated the same; of an aborted answer, as far as it goes."""
    if output.request.prompt != plain.request.prompt:
        return False
    if output.reason is FinishReason.ABORT:
        return plain.tokens[: len(output.tokens)] == output.tokens
    return output.tokens == plain.tokens and output.reason is plain.reason


def _status(engine: Engine) -> str:
    counts = engine.scheduler.counts()
    return (
        f"{counts[State.RUNNING]} running, {counts[State.SWAPPED]} swapped, {counts[State.WAITING]} waiting, "
        f"{engine.manager.free_device_blocks} free"
    )
