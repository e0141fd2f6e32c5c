"""``kvroute verify``: the routed experts that any server hands out, judged row by row.

The server is asked over HTTP, and may or may not have kvroute. ``asking`` asks, ``judging`` judges, ``weights``
computes the right rows. ``bench`` measures what rows cost there, and ``deployment`` looks at engines that run.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from json import dumps, loads
from pathlib import Path
from typing import Any, Final

from cache_manager.errors import InvalidInputError
from cache_manager.progress import Progress
from cache_manager.spec import AuxBlockDataSpec
from kvroute.findings import console, write_json
from kvroute.rollout import open_rollouts
from kvroute.routing import routing_spec_from_hf
from kvroute.verify.asking import NO_ROWS, EngineAnswer, Server, ServerError, played
from kvroute.verify.judging import Findings, judge

LONGEST: Final = 512
"""Tokens of the longest prompt, unless the model takes fewer."""
COLUMNS: Final = ("right", "wrong", "missing", "unjudged")


def main(
    *,
    url: str,
    model: Path,
    rollouts: str,
    requests: int,
    longest: int | None,
    new: int,
    seed: int,
    dtype: str,
    json: Path | None = None,
) -> int:
    """``kvroute verify``; 1 if a row is wrong or a request has no answer."""
    spec = routing_spec_from_hf(model, block_tokens=1)
    vocabulary, context = limits_of(model)
    longest = min(LONGEST, context - 2 * new) if longest is None else longest
    for name, number, least in (("--requests", requests, 1), ("--longest", longest, 16), ("--new", new, 1)):
        if number < least:
            raise InvalidInputError(name, f"{least} or more", number)
    told: list[list[EngineAnswer] | ServerError] = []
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(console(json)))
        progress.say(f"asking {url}")
        left = stack.enter_context(closing(open_rollouts(rollouts))) if rollouts else None
        server = Server(url, spec, left, new, seed)
        rows = 0
        for answer in played(server, requests, longest, vocabulary):
            told.append(answer)
            rows += 0 if isinstance(answer, ServerError) else sum(len(completion.ids) for completion in answer)
            progress.say(f"{len(told)}/{max(requests, len(told))} requests, {rows:,} rows")
        return _judged(server, told, model, dtype, progress, json)


def _judged(
    server: Server,
    told: list[list[EngineAnswer] | ServerError],
    model: Path,
    dtype: str,
    progress: Progress,
    json: Path | None,
) -> int:
    """Judge what came, and report it; the exit status."""
    answers = [answer for each in told if not isinstance(each, ServerError) for answer in each]
    failed = [each for each in told if isinstance(each, ServerError)]
    found, by = judged(answers, server.spec, model, dtype, progress)
    wrong = bool(found.of("wrong") or failed)
    head = {"url": server.url, "engine": server.engine, "requests": len(told), "judged_by": by}
    progress.print(f"{server.url}: {server.engine}, {len(told)} requests, judged by {by}\n{report(found, failed)}")
    write_json(json, to_json(head | {"ok": not wrong}, found, failed))
    return int(wrong)


def judged(
    answers: list[EngineAnswer],
    spec: AuxBlockDataSpec,
    model: Path,
    dtype: str,
    progress: Progress,
) -> tuple[Findings, str]:
    """The findings of these answers, and by what they were judged: by the weights of ``model``, or by themselves.

    Raises :class:`ServerError` if none of them has rows.
    """
    if answers and all(answer.refused == NO_ROWS for answer in answers):
        wanted = "a server that returns them: --enable-return-routed-experts, or kvroute's connector"
        raise ServerError("routed_experts", wanted, NO_ROWS)
    progress.say("importing torch and transformers, and reading the weights")
    from kvroute.verify.weights import Weights

    weights, by = Weights.where_they_fit(model, spec, dtype)
    progress.say(f"judging {len(answers)} answers")
    return judge(answers, spec, weights), by


def limits_of(model: Path) -> tuple[int, int]:
    """The number of token ids, and the model's largest number of tokens."""
    config = loads((model / "config.json" if model.is_dir() else model).read_text())
    fields = {**config, **config.get("text_config", {})}
    return int(fields.get("vocab_size", 1000)), int(fields.get("max_position_embeddings", 1 << 20))


def report(findings: Findings, failed: list[ServerError]) -> str:
    """A table of rows, the faults of wrong ones, and the shortest prompt that shows one."""
    lines = [f"{'rows':<22}" + "".join(f"{column:>10}" for column in COLUMNS)]
    for kind, count in findings.rows.items():
        lines.append(f"{kind:<22}" + "".join(f"{count[column]:>10,}" for column in COLUMNS))
    lines.append(f"{'all':<22}" + "".join(f"{findings.of(column):>10,}" for column in COLUMNS))
    lines += [f"{count} answers have no rows: {why}" for why, count in findings.refused.most_common()]
    lines += causes(findings)
    if failed:
        lines.append(f"{len(failed)} requests have no answer; the first: {failed[0]}")
    if findings.faults:
        lines.append("wrong rows: " + ", ".join(f"{count:,} {fault}" for fault, count in findings.faults.most_common()))
    wrong = findings.shortest
    if wrong is not None:
        wanted = "" if wrong.wanted[0] < 0 else f"wanted experts {list(wrong.wanted)}, "
        lines.append(f"shortest prompt with a wrong row: {wrong.answer.prompt} tokens, {wrong.answer.kind}")
        lines.append(f"  {list(wrong.answer.tokens[: wrong.answer.prompt])}")
        lines.append(f"  and {len(wrong.answer.tokens) - wrong.answer.prompt} new ones; position {wrong.position}, ")
        lines[-1] += f"router {wrong.layer}: {wanted}got {list(wrong.got)}: {wrong.fault}"
    return "\n".join(lines) + "\n"


def causes(findings: Findings) -> list[str]:
    """A line for each cause of missing rows in answers that have others."""
    return [
        f"{count:,} rows are missing: {why}"
        for why, count in findings.causes.most_common()
        if why not in findings.refused
    ]


def to_json(head: dict[str, Any], found: Findings, failed: list[ServerError]) -> str:
    """The same for programs: ``head``, rows by kind of question and verdict, their sum, and what is wrong."""
    wrong = found.shortest
    shortest = wrong and {
        "what": wrong.answer.kind,
        "prompt": wrong.answer.tokens[: wrong.answer.prompt],
        "new": wrong.answer.tokens[wrong.answer.prompt :],
        "position": wrong.position,
        "router": wrong.layer,
        "wanted": wrong.wanted if wrong.wanted[0] >= 0 else None,
        "got": wrong.got,
        "fault": wrong.fault,
    }
    findings = head | {
        "rows": {what: {column: count[column] for column in COLUMNS} for what, count in found.rows.items()},
        "all": {column: found.of(column) for column in COLUMNS},
        "faults": dict(found.faults),
        "refused": dict(found.refused),
        "missing": dict(found.causes),
        "failed": [str(error) for error in failed],
        "shortest": shortest,
    }
    return dumps(findings, indent=2) + "\n"


__all__ = ["EngineAnswer", "Findings", "causes", "judged", "limits_of", "main", "report", "to_json"]
