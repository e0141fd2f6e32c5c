"""A tokenizer of whole words with a chat template, for the trainers' own loops."""

from __future__ import annotations

from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

TEMPLATE = """{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' eos ' }}{% endfor %}
{%- if add_generation_prompt %}assistant {% endif %}"""


def tokenizer(ids: dict[str, int]) -> PreTrainedTokenizerFast:
    """Of these words, among them ``pad``, ``eos`` and ``unknown``."""
    made = Tokenizer(WordLevel(ids, unk_token="unknown"))  # noqa: S106 - no password
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="pad", eos_token="eos")  # noqa: S106
    found.chat_template = TEMPLATE
    return found
