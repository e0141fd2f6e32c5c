"""Two engines of transformers' continuous batching, prefill and decode: every row is judged, and belongs to the KV
beside it.

The judge is that of ``test_transformers_example``: with salts the KV in decode's blocks tells which pass made it, and
only that pass's rows are right.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from salted_moe import SaltedMoe
from served_transformers import EXAMPLE, PAGE, Served, all_right, prompts, served
from waiting import GIVE_UP_S

sys.path.append(str(EXAMPLE.parent))
import transformers_prefill_decode as example

NEW = 12


@pytest.fixture
def two(moe: SaltedMoe) -> Iterator[tuple[Served, Served]]:
    more = {"num_blocks": 64, "max_batch_tokens": 64}
    with (
        served(moe, example.Prefill, new=1, **more) as first,
        served(moe, example.Decode, new=NEW, **more) as second,
    ):
        yield first, second


def prefilled(first: Served, asked: list[list[int]]) -> list[dict[str, str]]:
    """The tickets for prompts that prefill has computed."""
    first.ask(asked)
    all_right(first.verdict(), due=sum(map(len, asked)))
    tickets = first.embedded.tickets
    return [tickets.pop(name) for name in sorted(tickets, key=lambda name: int(name.rpartition("_")[2]))]


def test_decode_has_the_rows_of_the_kv_that_prefill_made(two: tuple[Served, Served]) -> None:
    """Goal: decode computes only what does not fill a block, and every row is of the KV beside it. Method: ragged
    prompts, some with a part in common, taken over one by one and then asked all at once.
    """
    first, second = two
    asked = [*prompts([5, 33, 8, 17, 64]), *prompts([9, 14], shared=24, seed=1)]
    tickets = prefilled(first, asked)
    second.manager.start()
    for prompt, ticket in zip(asked, tickets, strict=True):
        assert second.embedded.take_over(prompt, ticket) == (len(prompt) - 1) // PAGE * PAGE
    second.ask(asked)
    assert second.seen["hit"] == sum((len(prompt) - 1) // PAGE * PAGE for prompt in asked)
    all_right(second.verdict(), due=sum(map(len, asked)) + len(asked) * (NEW - 1))
    second.embedded.rows.assert_consistent()


def test_what_does_not_come_is_computed(two: tuple[Served, Served]) -> None:
    """Goal: decode always answers, whatever state prefill is in. Method: a ticket that was used, one of another prompt,
    and one of an engine that has closed."""
    first, second = two
    asked = prompts([33, 40, 50], seed=2)
    used, other, late = prefilled(first, asked)
    second.manager.start()
    assert second.embedded.take_over(asked[0], used) == 32
    assert second.embedded.take_over(asked[0], used) == 0
    assert second.embedded.take_over(asked[2], other) == 0
    first.embedded.crossing.close()
    assert second.embedded.take_over(asked[2], late) == 0
    second.ask(asked)
    assert second.seen["hit"] == 32
    all_right(second.verdict(), due=123 + 3 * (NEW - 1))


def test_the_example_runs() -> None:
    """Goal: the command on the page works. Method: run it, with a prefill process of its own."""
    path = EXAMPLE.with_name("transformers_prefill_decode.py")
    ran = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=GIVE_UP_S)
    assert ran.returncode == 0, ran.stderr[-2000:]
    lines = ran.stdout.splitlines()
    assert len(lines) == 4
    assert all("32 tokens came" in line and "complete" in line for line in lines)
