"""The judge of answers with sampling supports, and with routes in the same record: transformers' logits and routers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import models
import numpy as np

from bench.drawn_from import judged
from kvroute import Routes, SamplingSupport

CUT = {"temperature": 0.5, "top_k": 12, "top_p": 0.6}
ERROR = 1e-3
"""The largest error of a log probability over a support."""


def judge_drawn(home: Path, answers: Iterable[dict[str, Any]]) -> dict[str, Counter[str]]:
    """By scenario: supports and rows that are right, and tokens. No support and no row of a record is wrong.

    Each answer has a support for each of its tokens, and none for its prompt, whatever the cache has of it.
    """
    total = dict[str, Counter[str]]()
    for answer in answers:
        tokens = [*answer["prompt"], *answer["tokens"]]
        assert answer["start"] == len(answer["prompt"])
        assert len(answer["counts"]) == len(answer["tokens"]) == len(answer["logprobs"])
        right, wrong, error = judged(models.reference(home), answer, joint=True)
        assert (wrong, error < ERROR) == (0, True), answer["drawn"]
        count = total.setdefault(answer["drawn"], Counter())
        count.update(supports=right, tokens=len(answer["tokens"]), hits=answer["hits"])
        count.update(retractions=answer["retractions"])
        if answer["record"] is None:
            continue
        record = bytes.fromhex(answer["record"])
        support, routes = SamplingSupport.of_record(record), Routes.from_bytes(record)
        assert support is not None
        support.validate(tokens, loss_mask=[0] * support.start + [1] * len(support))
        assert (support.counts.tolist(), support.ids.tolist()) == (answer["counts"], answer["ids"])
        assert routes.complete
        rows = np.sort(routes.ids, axis=-1)
        assert (rows == models.routing(home, tokens[:-1])).all(), answer["drawn"]
        count.update(rows=len(routes))
    print("\nscenario: supports right of tokens, rows right, tokens hit")
    for scenario, count in total.items():
        print(f"{scenario}: {count['supports']} of {count['tokens']}, {count['rows']}, {count['hits']}")
        assert count["supports"] > 0.9 * count["tokens"], "the others are within float32's error of a bound"
    return total
