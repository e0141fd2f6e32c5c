"""transformers 5.23 answers from the KV of weights that are no longer there: the finding, end to end, on a CPU.

A continuous-batching manager keeps the blocks of finished requests, so that a prompt with the same beginning needs no
computing. Nothing takes those blocks out of the prefix cache when the weights change:

* ``generate_batch(persistent_manager=True)`` keeps the manager between two calls. What runs between them is
  ``ContinuousBatchProcessor.reset``, which calls ``cache.free_all_requests()`` and leaves the hashes of all full blocks
  in the ledgers; ``PagedAttentionCache.reset`` would clear them, and is called after the warmup only.
* ``ContinuousBatchingManager.pause`` is there to update the model in place, and keeps the cache on purpose. A request
  that comes after the update hits blocks that were computed before it.

Each scene asks one prompt, changes the weights, and asks the same prompt again. The judge is ``generate`` of the same
model, which has no prefix cache. The controls change one thing each and get the right tokens.

The life-cycle kit finds the first of the two from the block manager alone (invariant ``reset_forgets``, adapter
``examples/managers/transformers_cache.py``); this file shows what it means for the tokens.

Run it:  python examples/stale_prefix_in_transformers.py
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

PAGE_TOKENS, PROMPT_TOKENS, NEW_TOKENS = 4, 33, 8
DEADLINE_S = 60.0
CONFIG = LlamaConfig(
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=16,
    num_hidden_layers=2,
    vocab_size=128,
    intermediate_size=64,
    eos_token_id=None,
    bos_token_id=1,
    pad_token_id=0,
)
GREEDY = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
GREEDY_ALONE = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a scene's last question got."""

    scene: str
    cached: int  # tokens of the prompt that were taken from the prefix cache
    tokens: list[int]
    wanted: list[int]  # what ``generate`` gives with the weights that were there when the question was asked

    @property
    def right(self) -> bool:
        return self.tokens == self.wanted


def batching(sharing: bool = True) -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(
        page_size=PAGE_TOKENS,
        num_blocks=64,
        max_batch_tokens=64,
        max_memory_percent=0.5,
        allow_block_sharing=sharing,
        use_async_batching=False,
    )


def new_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).eval()


def change_weights(model: LlamaForCausalLM) -> None:
    """In place, as a trainer's weight update does."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.3)


def prompt(seed: int) -> list[int]:
    return torch.randint(2, 128, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(seed)).tolist()


def plain(model: LlamaForCausalLM, tokens: list[int]) -> list[int]:
    """The judge: the same model's answer, computed from nothing."""
    with torch.no_grad():
        return model.generate(torch.tensor([tokens]), generation_config=GREEDY_ALONE)[0][len(tokens) :].tolist()


@contextmanager
def watched_matches() -> Iterator[list[int]]:
    """How many tokens each look-up in the prefix cache found, in order."""
    found: list[int] = []
    original: Callable[[PagedAttentionCache, str, list[int]], int] = PagedAttentionCache.search_prefix_match

    def watching(cache: PagedAttentionCache, request_id: str, prompt_ids: list[int]) -> int:
        found.append(original(cache, request_id, prompt_ids))
        return found[-1]

    PagedAttentionCache.search_prefix_match = watching
    try:
        yield found
    finally:
        PagedAttentionCache.search_prefix_match = original


def two_sessions(
    scene: str,
    *,
    other_prompt: bool = False,
    fresh_manager: bool = False,
    sharing: bool = True,
    reset_cache: bool = False,
) -> Answer:
    """A persistent manager: one ``generate_batch``, new weights, and one more, with at most one thing changed."""
    model, first = new_model(), prompt(1)
    second = prompt(2) if other_prompt else first

    def ask(tokens: list[int]) -> list[int]:
        answers = model.generate_batch(
            [tokens],
            generation_config=GREEDY,
            continuous_batching_config=batching(sharing),
            persistent_manager=True,
            progress_bar=False,
        )
        (answer,) = answers.values()
        return list(answer.generated_tokens)

    with watched_matches() as found:
        try:
            ask(first)
            if fresh_manager:
                model.destroy_cached_continuous_batching_manager()
            if reset_cache:
                model._cached_continuous_batching_manager.batch_processor.cache.reset()
            change_weights(model)
            tokens = ask(second)
        finally:
            model.destroy_cached_continuous_batching_manager()
    return Answer(scene, found[-1] if found else 0, tokens, plain(model, second))


def updated_in_a_pause(scene: str, *, other_prompt: bool = False) -> Answer:
    """One session: a question, new weights inside ``pause()``, and a question."""
    model, first = new_model(), prompt(1)
    second = prompt(2) if other_prompt else first

    def ask(manager: ContinuousBatchingManager, tokens: list[int]) -> list[int]:
        manager.add_request(tokens, max_new_tokens=NEW_TOKENS)
        answer = manager.get_result(timeout=DEADLINE_S)
        if answer is None or not answer.is_finished():
            raise RuntimeError(f"no answer in {DEADLINE_S} s: {answer}")
        return list(answer.generated_tokens)

    with (
        watched_matches() as found,
        model.continuous_batching_context_manager(
            generation_config=GREEDY, continuous_batching_config=batching()
        ) as manager,
    ):
        ask(manager, first)
        with manager.pause():
            change_weights(model)
        tokens = ask(manager, second)
    return Answer(scene, found[-1], tokens, plain(model, second))


def scenes() -> list[Answer]:
    return [
        two_sessions("two sessions of a persistent manager"),
        two_sessions("  control: another prompt", other_prompt=True),
        two_sessions("  control: a fresh manager", fresh_manager=True),
        two_sessions("  control: allow_block_sharing=False", sharing=False),
        two_sessions("  way round: cache.reset() between them", reset_cache=True),
        updated_in_a_pause("weights updated inside pause()"),
        updated_in_a_pause("  control: another prompt", other_prompt=True),
    ]


def main() -> int:
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    print(f"{'scene':<42}{'cached':>7}  {'verdict':<8}tokens, and what generate() answers")
    answers = scenes()
    for answer in answers:
        verdict = "right" if answer.right else "WRONG"
        print(f"{answer.scene:<42}{answer.cached:>7}  {verdict:<8}{answer.tokens}")
        if not answer.right:
            print(f"{'':<59}{answer.wanted}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
