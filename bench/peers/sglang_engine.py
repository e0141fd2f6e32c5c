"""One SGLang engine, asked over standard input: ``python -m bench.peers.sglang_engine OPTIONS_AS_JSON``.

Each line has ``prompts`` and ``tokens``, of all or of each: it makes greedy completions of that length with routed
experts, and returns these if ``rows``. On a CPU it needs the environment of ``make test-sglang``.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

from bench.harness import serve_answers


def main() -> None:
    import sglang

    fixed = {"skip_tokenizer_init": True, "enable_return_routed_experts": True, "log_level": "error"}
    engine = sglang.Engine(**fixed, **json.loads(sys.argv[1]))

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        lengths = np.broadcast_to(asked["tokens"], len(asked["prompts"])).tolist()
        sampling = [{"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True} for tokens in lengths]
        start = time.perf_counter()
        found = engine.generate(input_ids=asked["prompts"], sampling_params=sampling, return_routed_experts=True)
        told: dict[str, Any] = {"seconds": time.perf_counter() - start}
        if asked.get("rows"):
            of = ("routed_experts", "cached_tokens", "cached_tokens_details")
            told["answers"] = [[each["output_ids"], *(each["meta_info"].get(name) for name in of)] for each in found]
        return told

    serve_answers(sglang.__version__, answer)


if __name__ == "__main__":
    main()
