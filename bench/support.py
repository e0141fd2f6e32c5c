"""What does a sampling support cost, from an engine's answer to a trainer's array?

``--answers`` answers of ``--tokens`` tokens each; the ids are any of 151,936. About half of the tokens were drawn from
one id, a few from many; the numbers are printed. Each step's time is of the client's or the trainer's process: no code
of kvroute runs in an engine for supports, so this is not what an engine pays for them. The last column is the time of
one copy of the same bytes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.harness import Table, asked, router_ids, write_json
from kvroute import RequestJournal, Routes, SamplingSupport, routing_spec
from kvroute.integrations.sglang import support
from kvroute.replay import prime_rl, skyrl

VOCABULARY, PROMPT, TOP_K = 151_936, 512, 512
LAYERS, EXPERTS, CHOSEN = 48, 128, 8


def answer(tokens: int, seed: int) -> dict[str, Any]:
    """An answer of SGLang with so many tokens, as plain values."""
    random = np.random.default_rng(seed)
    counts = np.where(random.random(tokens) < 0.46, 1, 1 + random.lognormal(1.6, 1.4, tokens).astype(int))
    rows = [random.choice(VOCABULARY, min(count, TOP_K), replace=False).tolist() for count in counts]
    return {
        "prompt_token_ids": random.integers(0, VOCABULARY, PROMPT).tolist(),
        "output_ids": [row[0] for row in rows],
        "meta_info": {"id": str(seed), "output_token_sampling_mask": rows},
    }


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    begun_s = time.perf_counter()
    result = call()
    return result, time.perf_counter() - begun_s


def measured(told: dict[str, Any]) -> tuple[dict[str, tuple[float, int]], SamplingSupport]:
    """Seconds and bytes of each step of one answer, and its supports."""
    found = dict[str, tuple[float, int]]()
    text = json.dumps(told)
    _, seconds = timed(lambda: json.loads(text))
    mask_nbytes = len(json.dumps(told["meta_info"]["output_token_sampling_mask"]))
    found["the whole answer's JSON, parsed by Python"] = seconds, mask_nbytes
    drawn, seconds = timed(lambda: support(told))
    found["support(answer): checked, bound to its tokens"] = seconds, drawn.counts.nbytes + drawn.ids.nbytes
    tokens = [*told["prompt_token_ids"], *told["output_ids"]]
    journal = RequestJournal(routing_spec(EXPERTS, CHOSEN, range(LAYERS), LAYERS, block_tokens=16))
    journal.settle(tokens)
    _, seconds = timed(lambda: journal.record_support(drawn))
    found["journal.record_support"] = seconds, drawn.counts.nbytes + drawn.ids.nbytes
    kept, seconds = timed(lambda: journal.support(PROMPT))
    assert kept == drawn
    found["journal.support"] = seconds, drawn.counts.nbytes + drawn.ids.nbytes
    mask = [0] * PROMPT + [1] * len(drawn)
    _, seconds = timed(lambda: drawn.validate(tokens, loss_mask=mask))
    found["validate, with the trainer's tokens"] = seconds, 0
    rows, seconds = timed(lambda: skyrl.rollout_sample_support([drawn], [PROMPT], [mask[PROMPT:]], top_k=TOP_K))
    found[f"SkyRL's rows of {TOP_K}"] = seconds, rows[0].nbytes
    packed, seconds = timed(lambda: prime_rl.sampling_mask(drawn, [bool(trains) for trains in mask]))
    found["prime-rl's counts and ids"] = seconds, len(packed["ids"]) + len(packed["counts"])
    ids = router_ids(len(tokens) - 1, LAYERS, CHOSEN, EXPERTS, seed=0)
    routes = Routes(ids, np.ones(len(ids), np.bool_), range(LAYERS), EXPERTS, LAYERS).bind(tokens, (len(ids),))
    (_, content), seconds = timed(drawn.to_part)
    found["in a record, beside 384 bytes of routes"] = seconds, len(content)
    both = routes.to_bytes(drawn)
    read, seconds = timed(lambda: SamplingSupport.of_record(both))
    assert read == drawn
    found["SamplingSupport.of_record"] = seconds, len(both)
    return found, drawn


def main() -> None:
    args = asked(__doc__, 5, answers=(4, "how many"), tokens=(32_768, "of each answer"))
    answers = [answer(args.tokens, seed) for seed in range(args.answers)]
    rounds = [[measured(told)[0] for told in answers] for _ in range(args.rounds)]
    table = Table(
        f"sampling supports, {args.answers} answers of {args.tokens} tokens",
        ["step", "us a token", "bytes a token", "copies of these bytes"],
    )
    count = args.answers * args.tokens
    results = dict[str, list[float]]()
    for step in rounds[0][0]:
        seconds = min(sum(found[step][0] for found in each) for each in rounds)
        nbytes = sum(found[step][1] for found in rounds[0])
        copied = np.ones(max(nbytes, 1), np.uint8)
        copy_s = min(timed(copied.copy)[1] for _ in range(9))
        results[step] = [seconds / count * 1e6, nbytes / count]
        ratio = f"{seconds / copy_s:.1f}" if nbytes else ""
        table.row(step, f"{seconds / count * 1e6:.3f}", f"{nbytes / count:.1f}", ratio)
    table.print()
    drawn = [len(row) for told in answers for row in told["meta_info"]["output_token_sampling_mask"]]
    spread = {"mean": float(np.mean(drawn)), "median": float(np.median(drawn)), "p99": float(np.quantile(drawn, 0.99))}
    print({name: round(value, 1) for name, value in spread.items()})
    write_json(args.json, steps=results, ids=spread)


if __name__ == "__main__":
    main()
