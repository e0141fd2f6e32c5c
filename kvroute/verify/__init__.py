"""``kvroute verify``: the routed experts that any server hands out, judged row by row.

The server is asked over HTTP, and may or may not have kvroute. ``asking`` asks, ``judging`` judges, ``weights``
computes the right rows.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final

from cache_manager.errors import InvalidInputError
from kvroute.rollout import open_rollouts
from kvroute.routing import routing_spec_from_hf
from kvroute.verify.asking import NO_ROWS, Answer, Server, ServerError, played
from kvroute.verify.judging import Findings, judge

LONGEST: Final = 512
"""Tokens of the longest prompt, unless the model takes fewer."""
COLUMNS: Final = ("right", "wrong", "missing", "unjudged")


def main(
    *, url: str, model: Path, rollouts: str, requests: int, longest: int | None, new: int, seed: int, dtype: str
) -> int:
    """``kvroute verify``; 1 if a row is wrong or a request has no answer."""
    spec = routing_spec_from_hf(model, block_tokens=1)
    vocabulary, context = _limits(model)
    longest = min(LONGEST, context - 2 * new) if longest is None else longest
    for name, number, least in (("--requests", requests, 1), ("--longest", longest, 16), ("--new", new, 1)):
        if number < least:
            raise InvalidInputError(name, f"{least} or more", number)
    with ExitStack() as stack:
        rollout_store = stack.enter_context(closing(open_rollouts(rollouts))) if rollouts else None
        server = Server(url, spec, rollout_store, new, seed)
        replies = list(played(server, requests, longest, vocabulary))
    answers = [answer for reply in replies if not isinstance(reply, ServerError) for answer in reply]
    failed = [reply for reply in replies if isinstance(reply, ServerError)]
    if answers and all(answer.refused == NO_ROWS for answer in answers):
        wanted = "a server that returns them: --enable-return-routed-experts, or kvroute's connector"
        raise ServerError("routed_experts", wanted, NO_ROWS)
    from kvroute.verify.weights import Weights

    weights, by = Weights.where_they_fit(model, spec, dtype)
    findings = judge(answers, spec, weights)
    sys.stdout.write(f"{server.url}: {server.engine}, {len(replies)} requests, judged by {by}\n")
    sys.stdout.write(report(findings, failed))
    return int(bool(findings.of("wrong") or failed))


def _limits(model: Path) -> tuple[int, int]:
    """The number of token ids, and the model's largest number of tokens."""
    config = json.loads((model / "config.json" if model.is_dir() else model).read_text())
    fields = {**config, **config.get("text_config", {})}
    return int(fields.get("vocab_size", 1000)), int(fields.get("max_position_embeddings", 1 << 20))


def report(findings: Findings, failed: list[ServerError]) -> str:
    """A table of rows, the faults of wrong ones, and the shortest prompt that shows one."""
    lines = [f"{'rows':<22}" + "".join(f"{column:>10}" for column in COLUMNS)]
    for kind, count in findings.rows.items():
        lines.append(f"{kind:<22}" + "".join(f"{count[column]:>10,}" for column in COLUMNS))
    lines.append(f"{'all':<22}" + "".join(f"{findings.of(column):>10,}" for column in COLUMNS))
    lines += [f"{count} answers have no rows: {why}" for why, count in findings.refused.most_common()]
    if failed:
        lines.append(f"{len(failed)} requests have no answer; the first: {failed[0]}")
    if findings.faults:
        lines.append("wrong rows: " + ", ".join(f"{count:,} {fault}" for fault, count in findings.faults.most_common()))
    if (wrong := findings.shortest) is not None:
        wanted = "" if wrong.wanted[0] < 0 else f"wanted experts {list(wrong.wanted)}, "
        lines.append(f"shortest prompt with a wrong row: {wrong.answer.prompt} tokens, {wrong.answer.kind}")
        lines.append(f"  {list(wrong.answer.tokens[: wrong.answer.prompt])}")
        lines.append(f"  and {len(wrong.answer.tokens) - wrong.answer.prompt} new ones; position {wrong.position}, ")
        lines[-1] += f"router {wrong.layer}: {wanted}got {list(wrong.got)}: {wrong.fault}"
    return "\n".join(lines) + "\n"


__all__ = ["Answer", "Findings", "main", "report"]
