"""Bodies: what does not fit is named, whatever it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.errors import InvalidInputError
from paged_engine.serving.bodies import CompletionBody, DecodeBody, PrefillBody, parse

GOOD = {"model": "m", "prompt": [1, 2]}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": 3}, "model"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a"]}, "prompt[0]"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 1.5}, "n"),
        ({"stream": 1}, "stream"),
        ({"return_routed_experts": "yes"}, "return_routed_experts"),
        ({"best_of": 3}, "best_of"),
    ],
)
def test_the_field_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        parse(CompletionBody, json.dumps(GOOD | change).encode())
    assert refused.value.field == field


def test_what_is_missing_is_named() -> None:
    with pytest.raises(InvalidInputError, match="sampling: wanted a value, got nothing"):
        parse(PrefillBody, b'{"id": "a", "prompt": []}')
    with pytest.raises(InvalidInputError, match=r"sampling.max_tokens: wanted a value, got nothing"):
        parse(PrefillBody, b'{"id": "a", "prompt": [], "sampling": {}}')


@given(st.binary() | st.text().map(str.encode) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(
    lambda value: json.dumps(value).encode()
))  # fmt: skip
def test_hostile_bytes_are_an_input_error(text: bytes) -> None:
    for kind in (CompletionBody, PrefillBody, DecodeBody):
        with pytest.raises(InvalidInputError):
            parse(kind, text)


def test_deep_nesting_is_an_input_error() -> None:
    with pytest.raises(InvalidInputError):
        parse(CompletionBody, b'{"model":' + b"[" * 100_000)
