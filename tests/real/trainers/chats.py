"""A tokenizer of whole words with a chat template, for the trainers' own loops, and the output of verl's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

TEMPLATE = """{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' eos ' }}{% endfor %}
{%- if add_generation_prompt %}assistant {% endif %}"""


def tokenizer(ids: dict[str, int]) -> PreTrainedTokenizerFast:
    """Of these words, among them ``pad``, ``eos`` and ``unknown``."""
    made = Tokenizer(WordLevel(ids, unk_token="unknown"))  # noqa: S106 - no password
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="pad", eos_token="eos")  # noqa: S106
    found.chat_template = TEMPLATE
    return found


def loop_output(rows: Any, prompt: Sequence[int], response: Sequence[int]) -> AgentLoopOutput:
    """The output of verl's agent loop for a sample of these tokens."""
    tokens = {"prompt_ids": [*prompt], "response_ids": [*response], "response_mask": [1] * len(response)}
    return AgentLoopOutput(**tokens, routed_experts=rows, metrics=AgentLoopMetrics())
