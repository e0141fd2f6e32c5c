"""The demo's clients: conversations of several turns that share system prompts and repeat their history."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from paged_engine import text
from paged_engine.request import Output, Request

TURNS = 4
NEW_TOKENS_MAX = 32
SYSTEM_PROMPTS = 3
ABORT_AFTER_TOKENS = 4
"""An impatient client disconnects when its answer has this many tokens."""


@dataclass(slots=True)
class Conversation:
    """One client: it asks, waits for the answer, and asks again with everything so far as the prompt.

    Every third turn asks for two samples; odd conversations sample with noise. One client in four disconnects in the
    middle of its last answer, for which it asks for one sample.
    """

    number: int
    questions: tuple[str, ...]
    seed: int
    history: list[int] = field(default_factory=list)
    turn: int = 0

    @property
    def gives_up(self) -> bool:
        """Whether the client will not wait for the answer to its next turn, or to the one that it has asked."""
        return self.number % 4 == 1 and self.turn == len(self.questions) - 1

    def ask(self) -> Request:
        """The request of the next turn."""
        return Request(
            id=f"conversation-{self.number}-turn-{self.turn}",
            prompt=tuple(self.history + text.turn(self.questions[self.turn])),
            max_tokens=NEW_TOKENS_MAX,
            n=2 if (self.number + self.turn) % 3 == 0 and not self.gives_up else 1,
            temperature=0.8 if self.number % 2 else 0.0,
            seed=self.seed ^ self.number,
            stop_tokens=frozenset({text.END}),
        )

    def hear(self, answer: Output) -> None:
        """Go on from the first sample's answer."""
        self.history = list(answer.sequence)
        self.turn += 1


def conversations(requests: int, seed: int) -> list[Conversation]:
    """Conversations of up to ``TURNS`` turns that make ``requests`` requests in all; the same for the same seed."""
    draw = random.Random(seed)  # noqa: S311 (a workload, not a secret)
    found = []
    for number in range(-(-requests // TURNS)):
        turns = min(TURNS, requests - number * TURNS)
        system = text.paragraphs()[number % SYSTEM_PROMPTS]
        questions = tuple(draw.sample(text.questions(), turns))
        found.append(Conversation(number, questions, seed, history=text.opening(system)))
    return found


def longest_tokens(clients: list[Conversation]) -> int:
    """The most tokens that one sequence of these conversations can have."""
    return max(
        len(client.history) + sum(len(text.turn(q)) + NEW_TOKENS_MAX for q in client.questions) for client in clients
    )
