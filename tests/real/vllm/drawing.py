"""An engine of vLLM whose sampler says what it drew tokens from: a process of its own, in Triton's interpreter.

``python -m drawing HOME ANSWERS``, with the environment of :data:`interpreter.ENVIRONMENT` set before: only Model
Runner V2 returns sampling masks, and vLLM chooses the runner when it is imported. ``ANSWERS`` becomes a JSON file:
by scenario a list of answers as plain values.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from engines import Engine
from vllm.v1.sample.ops import topk_topp_sampler

from bench.vllm_models import VOCABULARY
from bench.vllm_support import scenarios


def main(home: Path, answers: Path) -> None:
    topk_topp_sampler.HAS_TRITON = False  # its kernel for top-k and top-p does not run in the interpreter
    engine = Engine(
        home,
        logprobs_mode="processed_logprobs",
        return_sampling_mask=True,
        num_gpu_blocks_override=11,
        max_num_seqs=4,
        max_model_len=256,
    )
    found = scenarios(
        lambda given, new, sampling: engine.ask(given, new, **sampling),
        lambda: engine.metric("num_preemptions"),
        VOCABULARY,
    )
    engine.close()
    answers.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
