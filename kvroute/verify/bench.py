"""``kvroute bench``: what rows cost a deployment, in tokens per second and in bytes, and whether they are right there.

Rounds with rows and without take turns, each with prompts of its own that no cache has, after a round of each that is
not counted. Answers are read when the clock has stopped, and judged as ``kvroute verify`` judges them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from json import dumps
from pathlib import Path
from statistics import median
from typing import Any, Final

from cache_manager.errors import InvalidInputError
from cache_manager.progress import Progress
from kvroute.findings import console, write_json
from kvroute.rollout import open_rollouts
from kvroute.routing import routing_spec_from_hf
from kvroute.verify import COLUMNS, causes, judged, limits_of
from kvroute.verify.asking import NO_ROWS, EngineAnswer, Question, Reply, Server, ServerError
from kvroute.verify.judging import Findings

AGAIN: Final = 4
"""Prompts that are asked once more at the end, uncounted: the server may have put their KV away and brought it back."""
NOT_COMPARED: Final = (
    "vLLM captures rows for every request: name a server of the same model without kvroute, --without URL"
)


@dataclass(slots=True)
class AskedSide:
    """A server, and what its rounds have shown."""

    server: Server
    name: str
    rates: list[float] = field(default_factory=list)  # new tokens per second, by round
    nbytes: int = 0  # of all answers
    seconds: list[float] = field(default_factory=list)  # of each answer
    answers: list[EngineAnswer] = field(default_factory=list)
    failed: list[ServerError] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "url": self.server.url,
            "tokens_per_second": [round(rate, 3) for rate in self.rates],
            "answer_nbytes": self.nbytes // max(1, len(self.seconds)),
            "answer_seconds": round(median(self.seconds), 4) if self.seconds else None,
            "failed": [str(error) for error in self.failed],
        }


def main(
    *,
    url: str,
    model: Path,
    without: str | None,
    rollouts: str,
    rounds: int,
    requests: int,
    at_once: int,
    prompt: int,
    new: int,
    seed: int,
    dtype: str,
    json: Path | None = None,
) -> int:
    """``kvroute bench``; 1 if a row is wrong or a request has no answer."""
    spec = routing_spec_from_hf(model, block_tokens=1)
    vocabulary, context = limits_of(model)
    if prompt + new > context:
        wanted = f"at most {context} tokens together, as the model takes"
        raise InvalidInputError("--prompt, --new", wanted, prompt + new)
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(console(json)))
        progress.say(f"asking {url}")
        left = stack.enter_context(closing(open_rollouts(rollouts))) if rollouts else None
        sides = [AskedSide(Server(url, spec, left, new, seed), "with rows")]
        if without or sides[0].server.engine == "SGLang":
            sides.append(AskedSide(Server(without or url, spec, None, new, seed, with_rows=False), "without"))
        source = random.Random(seed)  # noqa: S311 - no secret
        again: list[Question] = []
        for number in range(rounds + 1):
            for side in sides if number % 2 else reversed(sides):
                counted = f"round {number} of {rounds}" if number else "a first round, which is not counted"
                progress.say(f"{side.name}: {counted}")
                prompts = [tuple(source.randrange(3, vocabulary) for _ in range(prompt)) for _ in range(requests)]
                questions = [Question("counted" if number else "not counted", tokens) for tokens in prompts]
                _round(side, questions, at_once, bool(number))
                if side is sides[0] and not again:
                    again = [Question("asked again", question.prompt) for question in questions[:AGAIN]]
        _round(sides[0], again, 1, False)
        _check_without(sides[1:])
        found, by = judged(sides[0].answers, spec, model, dtype, progress)
        failed = [error for side in sides for error in side.failed]
        is_wrong = bool(found.of("wrong") or failed)
        rows_nbytes = spec.row_nbytes * (prompt + new - 1)
        progress.print(_report(sides, found, failed, rows_nbytes, by))
    facts = {
        "engine": sides[0].server.engine,
        "rounds": rounds,
        "requests": requests,
        "at_once": at_once,
        "prompt": prompt,
        "new": new,
        "rows_nbytes": rows_nbytes,
        "ratios": [round(ratio, 4) for ratio in _ratios(sides)],
        "judged_by": by,
        "all": {column: found.of(column) for column in COLUMNS},
        "missing": dict(found.causes),
        "ok": not is_wrong,
    }
    write_json(json, dumps(facts | {side.name.replace(" ", "_"): side.to_json() for side in sides}, indent=2) + "\n")
    return int(is_wrong)


def _round(
    side: AskedSide,
    questions: Sequence[Question],
    at_once: int,
    counts: bool,
) -> None:
    """Ask all of them, so many at a time; read what came when the last answer is there."""
    with ThreadPoolExecutor(at_once) as pool:
        began_s = time.perf_counter()
        replies = list(pool.map(side.server.reply, questions))
        seconds = time.perf_counter() - began_s
    new_tokens = 0
    for question, reply in zip(questions, replies, strict=True):
        answers = side.server.answers(question, reply)
        if isinstance(answers, ServerError):
            side.failed.append(answers)
            continue
        side.answers += answers
        new_tokens += sum(len(answer.tokens) - answer.prompt for answer in answers)
        if counts and isinstance(reply, Reply):
            side.nbytes += len(reply.content)
            side.seconds.append(reply.seconds)
    if counts:
        side.rates.append(new_tokens / seconds)


def _check_without(sides: Sequence[AskedSide]) -> None:
    """Raise :class:`ServerError` if the server that is to have no rows has some."""
    for side in sides:
        if any(answer.refused != NO_ROWS for answer in side.answers):
            wanted = "a server whose answers have no rows"
            raise ServerError("--without", wanted, f"rows of {side.server.url}")


def _ratios(sides: Sequence[AskedSide]) -> list[float]:
    """Tokens per second with rows relative to those without, round by round."""
    if len(sides) == 1:
        return []
    pairs = zip(sides[0].rates, sides[1].rates, strict=True)
    return [with_rows / without for with_rows, without in pairs if without]


def _report(
    sides: Sequence[AskedSide],
    found: Findings,
    failed: list[ServerError],
    rows_nbytes: int,
    by: str,
) -> str:
    """A table with a column for each side, and what was judged."""
    first = sides[0].server
    lines = [f"{first.url}: {first.engine}, {len(sides[0].rates)} rounds"]
    lines.append(f"{'':<26}" + "".join(f"{side.name:>22}" for side in sides))
    lines.append(f"{'new tokens a second':<26}" + "".join(f"{_spread(side.rates, 1):>22}" for side in sides))
    lines.append(f"{'seconds of an answer':<26}" + "".join(f"{_spread(side.seconds, 2):>22}" for side in sides))
    means = [side.nbytes // max(1, len(side.seconds)) for side in sides]
    lines.append(f"{'bytes of an answer':<26}" + "".join(f"{mean:>22,}" for mean in means))
    lines.append(f"{'bytes of its rows alone':<26}{rows_nbytes:>22,}")
    ratios = _ratios(sides)
    if ratios:
        lines.append(f"tokens a second with rows, relative to those without: {_spread(ratios, 2)}")
    else:
        lines.append(f"not compared: {NOT_COMPARED}")
    counts = ", ".join(f"{found.of(column):,} {column}" for column in COLUMNS)
    lines.append(f"rows: {counts}; judged by {by}")
    lines += [f"{count} answers have no rows: {why}" for why, count in found.refused.most_common()]
    lines += causes(found)
    if failed:
        lines.append(f"{len(failed)} requests have no answer; the first: {failed[0]}")
    return "\n".join(lines) + "\n"


def _spread(values: Sequence[float], digits: int) -> str:
    """The median, and the least and the largest value."""
    if not values:
        return "-"
    return f"{median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


__all__ = ["AskedSide", "main"]
