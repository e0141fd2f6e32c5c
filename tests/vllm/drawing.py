"""An engine of vLLM whose sampler says what it drew tokens from: a process of its own, in Triton's interpreter.

``python -m drawing HOME ANSWERS``, with the environment of :func:`interpreter.ENVIRONMENT` set before: only Model
Runner V2 returns sampling masks, and vLLM chooses the runner when it is imported. ``ANSWERS`` becomes a JSON file:
by scenario a list of answers as plain values.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

SAMPLING: Final[dict[str, Any]] = {"temperature": 0.5, "top_k": 12, "top_p": 0.6, "logprobs": 0}
NEW: Final = 12
LONG: Final = 48


def answer(output: Any, sampling: dict[str, Any]) -> list[dict[str, Any]]:
    """Each completion: its tokens, supports and log probabilities, and its routes."""
    from kvroute.integrations.vllm import routes, support

    return [
        {
            "prompt": list(output.prompt_token_ids),
            "tokens": list(completion.token_ids),
            "start": (drawn := support(output, completion.index)).start,
            "counts": drawn.counts.tolist(),
            "ids": drawn.ids.tolist(),
            "logprobs": [
                chosen[t].logprob for t, chosen in zip(completion.token_ids, completion.logprobs, strict=True)
            ],
            "cached": output.num_cached_tokens,
            "sampling": sampling,
            "record": routes(output, completion.index).to_bytes(drawn).hex(),
        }
        for completion in output.outputs
    ]


def main(home: Path, answers: Path) -> None:
    from engines import Engine, prompts
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False  # its kernel for top-k and top-p does not run in the interpreter
    found: dict[str, Any] = {}
    engine = Engine(
        home,
        logprobs_mode="processed_logprobs",
        return_sampling_mask=True,
        num_gpu_blocks_override=11,
        max_num_seqs=4,
        max_model_len=256,
    )
    first = prompts(3, 40, 70, 33)

    def ask(scenario: str, given: list[list[int]], new: int = NEW, **sampling: Any) -> list[dict[str, Any]]:
        asked = {**SAMPLING, **sampling}
        outputs = engine.ask(given, new, **asked)
        found[scenario] = [each for output in outputs for each in answer(output, asked)]
        return found[scenario]

    ask("plain", first, seed=1)
    ask("prefix hits", first, seed=2)
    ask("n = 2", first[:1], seed=3, n=2)
    ask("min-p", first[1:], seed=4, top_p=1.0, min_p=0.3)
    ask("top-k of one", first[1:], seed=5, top_k=1)
    before = engine.metric("num_preemptions")
    ask("preempted", prompts(4, 60, 60, 60, 60), LONG, seed=6)
    found["preemptions"] = engine.metric("num_preemptions") - before
    turns = ask("a first turn", prompts(5, 50), seed=7)
    ask("a second turn", [[*turns[0]["prompt"], *turns[0]["tokens"], 7, 8, 9]], seed=8)
    engine.close()
    answers.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
