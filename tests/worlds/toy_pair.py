"""A prefill and a decode engine whose rows of the same tokens differ, and the judge of the second one's answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from toy_crossing import ToyCrossing
from toy_engine import judge

from kvroute.connector import missing, routes

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
SAID = [8, 9, 7]
PREFILL, DECODE = 1, 0  # their weights, by which rows of the one and of the other are told apart


@contextmanager
def two(**said: Any) -> Iterator[tuple[ToyCrossing, ToyCrossing]]:
    """A prefill and a decode engine whose rows of the same tokens differ."""
    first, second = ToyCrossing(**said), ToyCrossing(**said)
    first.weights = PREFILL
    try:
        yield first, second
    finally:
        first.close()
        second.close()


def handed_over(
    first: ToyCrossing, tokens: list[int], chunks: list[int] | tuple[int, ...] = (64,), name: str = "p", **more: Any
) -> Any:
    """The ticket for a prompt that prefill has computed."""
    return first.ask(name, tokens, chunks, lends=True, **more)["kv_transfer_params"]["kvroute"]["transfer"]


def makers(tokens: int, said: int, local: int = 0) -> list[int]:
    """Which engine computed the rows of a prompt and of its answer; decode computes a prompt's last token again."""
    return [DECODE] * local + [PREFILL] * (tokens - 1 - local) + [DECODE] * (said + 1)


def taken(
    second: ToyCrossing, ticket: Any, prompt: list[int] = PROMPT, name: str = "d", **more: Any
) -> tuple[Counter[str], list[str]]:
    """The verdict on decode's answer: its rows, judged, and the reasons for the missing ones."""
    answer = second.ask(name, prompt, brought=len(prompt), ticket=ticket, more=SAID, **more)
    found = routes(answer)
    gaps = missing(answer)
    assert [(start, stop) for start, stop, _ in _joined(gaps)] == list(found.missing), "every gap has its reason"
    return judge(found, [*prompt, *SAID], makers(len(prompt), len(SAID))), sorted({why for *_, why in gaps})


def _joined(gaps: tuple[tuple[int, int, str], ...]) -> list[tuple[int, int, str]]:
    found = list[tuple[int, int, str]]()
    for start, stop, why in gaps:
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, stop, why))
    return found


ALL, OWN = len(PROMPT) + len(SAID), len(SAID) + 1  # rows of an answer, and those that decode computes itself
