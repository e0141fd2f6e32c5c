"""What is wrong with an adapter or its answers is named in one line."""

from __future__ import annotations

import pytest
from tiny_managers import Plain

from cache_manager.errors import InvalidInputError
from cache_manager.testing.life import (
    BlockManagerAdapter,
    prove,
)


class FailsAtOnce(Plain):
    def __init__(self, kv):
        raise OSError("no device")


def test_an_adapter_without_methods_and_a_run_of_nothing_are_named() -> None:
    with pytest.raises(InvalidInputError, match=r"admit\(\), grow\(\), commit\(\)"):
        prove(type("Empty", (BlockManagerAdapter,), {}))
    with pytest.raises(InvalidInputError, match="examples: wanted 1 or more, got 0"):
        prove(Plain, examples=0)


class ForgetsTrue(Plain):
    def admit(self, seq, tokens, chunk, salt):
        self.tables[seq] = []
        if Plain.grow(self, seq, tokens, len(tokens)):
            return 0
        del self.tables[seq]
        return None

    def grow(self, seq, tokens, upto):
        Plain.grow(self, seq, tokens, upto)


ODD = {
    "grow": (vars(ForgetsTrue), r"grow\(\): wanted bool, got None, after: "),
    "no number": ({"free_blocks": lambda _: "many"}, r"free_blocks\(\): wanted int, got 'many'"),
    "admit": (
        {"admit": lambda self, *given: Plain.admit(self, *given) is not None},
        r"admit\(\): wanted int \| None, got True",
    ),
    "no table": ({"table": lambda *_: None}, r"table\(\): wanted Sequence\[int \| None\], got None, after: admit s1"),
    "words": ({"table": lambda *_: "ab"}, r"table\(\): wanted Sequence\[int \| None\], got 'ab'"),
    "counts": ({"ref_counts": lambda _: [1, 2]}, r"ref_counts\(\): wanted Mapping\[int, int\] \| None, got \[1, 2\]"),
    "ids": ({"free_ids": lambda _: 5}, r"free_ids\(\): wanted Sequence\[int\] \| None, got 5"),
    "slots": ({"slots": lambda *_: []}, r"slots\(\): wanted Sequence\[tuple\[int, int\]\], got \[\]"),
    "batch": ({"grow_batch": lambda *_: None}, r"grow_batch\(\): wanted Sequence\[bool\], got None"),
    "signature": ({"admit": lambda _, seq: len(seq)}, r"admit\(\): wanted the parameters self, seq, .* got .* _, seq$"),
    "size": ({"block_tokens": "2"}, r"blocks: wanted two blocks of one token or more, got 8 blocks of '2'"),
    "pool": ({"blocks": 5}, r"blocks: wanted a collection of block ids, got 5"),
    "word": ({"capabilities": "prefix"}, r"capabilities: wanted a tuple of names, got 'prefix'"),
    "capability": ({"capabilities": ("teleport",)}, "capabilities: wanted some of"),
    "invariant": ({"unclaimed": {"no_luck": ""}}, "unclaimed: wanted some of"),
    "few blocks": ({"blocks": range(1)}, "blocks: wanted two blocks"),
    "method": ({"capabilities": ("swap", "rows")}, r"a method of its own: preempt\(\), .*read_rows\(\)"),
    "init": ({"__init__": FailsAtOnce.__init__}, "no device"),
}


@pytest.mark.parametrize(("wrong", "said"), ODD.values(), ids=ODD)
def test_an_answer_of_the_wrong_kind_is_named(wrong, said) -> None:
    """Goal: a user's first mistakes are reported in one line, and not as a broken invariant of blocks."""
    with pytest.raises(InvalidInputError, match=said) as caught:
        prove(type("Wrong", (Plain,), dict(wrong)))
    assert "\n" not in str(caught.value)
