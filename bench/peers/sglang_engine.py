"""One SGLang engine on a CPU, asked over standard input: ``python -m bench.peers.sglang_engine JSON``, its options.

Each line has ``prompts`` and ``tokens``: greedy completions of that length, with their routed experts. Needs the
environment of ``make test-sglang``.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from bench.harness import serve_answers


def main() -> None:
    import sglang

    fixed = {"device": "cpu", "dtype": "float32", "attention_backend": "torch_native", "skip_tokenizer_init": True}
    engine = sglang.Engine(
        **fixed,
        disable_cuda_graph=True,
        enable_return_routed_experts=True,
        log_level="error",
        **json.loads(sys.argv[1]),
    )

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        sampling = {"max_new_tokens": asked["tokens"], "temperature": 0.0, "ignore_eos": True}
        start = time.perf_counter()
        found = engine.generate(input_ids=asked["prompts"], sampling_params=sampling, return_routed_experts=True)
        return {"seconds": time.perf_counter() - start, "tokens": sum(len(each["output_ids"]) for each in found)}

    serve_answers(sglang.__version__, answer)


if __name__ == "__main__":
    main()
