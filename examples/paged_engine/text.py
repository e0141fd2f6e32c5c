"""Real text and a tokenizer for it, both in the package: nothing is downloaded.

The tokenizer is a byte-level BPE of 512 entries, trained on the packaged text in a moment; training is deterministic,
so that every process has the same one. Any string can be encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE: Final = 512
SPECIAL: Final = ("<|begin|>", "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>")
BEGIN, END, PAD, USER, ASSISTANT = range(len(SPECIAL))


@cache
def _parts(name: str, between: str) -> tuple[str, ...]:
    whole = (files("paged_engine") / name).read_text(encoding="utf-8")
    return tuple(part.strip() for part in whole.split(between) if part.strip())


def paragraphs() -> tuple[str, ...]:
    """The packaged prose, a paragraph each."""
    return _parts("corpus.txt", "\n\n")


def questions() -> tuple[str, ...]:
    """Questions about the prose, one line each."""
    return _parts("questions.txt", "\n")


@cache
def _tokenizer() -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*paragraphs(), *questions()], trainer)
    return tokenizer


def encode(text: str) -> list[int]:
    """The token ids of ``text``, without special tokens around it."""
    return list(_tokenizer().encode(text, add_special_tokens=False).ids)


def decode(tokens: Sequence[int]) -> str:
    """The text of ``tokens``; special tokens are left out, broken UTF-8 shows as replacement characters."""
    return str(_tokenizer().decode(list(tokens)))


def opening(system: str) -> list[int]:
    """The tokens that begin a conversation."""
    return [BEGIN, *encode(system)]


def turn(question: str) -> list[int]:
    """The tokens of one user turn, up to the beginning of the assistant's answer."""
    return [USER, *encode(question), END, ASSISTANT]
