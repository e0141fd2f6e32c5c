"""The table of the live tests: what each scenario's cells are with kvroute, and with the stock engine in the same plan.

``python tests/real/trainers_live/table.py FOLDER`` makes it of the files that runs have left in a folder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HEAD = "| trainer | engine | what happens | filled by | answers | cells due | right | missing | wrong |"


def markdown(counts: Sequence[dict[str, Any]]) -> str:
    """A line for each scenario and each of both that fill the field; ``counts`` are those of :data:`live.TABLE`."""
    lines = [HEAD, "|" + "---|" * 9]
    for row in counts:
        who = f"stock {row['engine'].split()[0]}" if row["stock"] else "kvroute"
        said = f"| {row['trainer']} | {row['engine']} | {row['scenario']} | {who} |"
        if "refused" in row:
            lines.append(f"{said} refused: {row['refused']} | | | | |")
        else:
            lines.append(f"{said} " + " | ".join(f"{row[name]:,}" for name in COUNTS) + " |")
    return "\n".join(lines)


COUNTS = "answers", "due", "right", "missing", "wrong"


def beside(folder: Path) -> list[dict[str, Any]]:
    """The counts of all runs in a folder, stock's behind kvroute's of the same scenario."""
    rows = [row for file in sorted(folder.glob("*.json")) for row in json.loads(file.read_text())]
    plan = list(dict.fromkeys(_cell(row) for row in rows if not row["stock"]))
    return sorted(rows, key=lambda row: (plan.index(_cell(row)), row["stock"]))


def _cell(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["trainer"], row["engine"], row["scenario"]


ABOUT = """# Trainers' own rollout code, over live engines

`make trainers-live-table` wrote this: each trainer's unchanged server, clients and arrays over the release of its
engine that it pins, on a CPU, once with kvroute and once with the engine's own capture. A cell is a layer of a row;
float32 transformers judges it over the answer's own tokens. *Missing*: the answer has no field, or a shorter one.

Stock vLLM is right here wherever it starts. It ends at its start if its flag meets a KV connector, so that rows of KV
from outside cannot be judged there. Stock SGLang runs without overlap scheduling here: with it, its copy of the rows is
none on a CPU. verl over stock SGLang has kvroute's name for a module that SGLang has moved; as it is, each of its
requests ends with `ModuleNotFoundError` ([verl](../../../docs/trainers/verl.md#with-sglang)).

Stock SGLang's wrong cells are of two kinds. Where KV came back from pages on the host, rows are those of the requests
that used the slots last; answers behind it that hit that KV have them, too. In miles' update, which retracts, tokens
that the old weights had sampled have the rows of the new ones.

slime, prime-rl and NeMo-RL are checkouts of August 2026, with `CHECKOUTS` of that target; what the tests give each of
them in the place of a GPU, or of a package that cannot be had, is on its page.

Why to distrust it: one model of three or four layers with random weights, answers of at most 128 tokens, one engine,
and no GPU, where vLLM's newer runner has another buffer. Counts vary by run where a string ends answers.
"""


if __name__ == "__main__":
    print(f"{ABOUT}\n{markdown(beside(Path(sys.argv[1])))}")
