"""What a run has exercised. One that has not done what the adapter says its manager can do has proved nothing of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Final

from cache_manager.testing.life.adapter import BlockManagerAdapter

EXAMPLES_MIN: Final = 50
"""With fewer examples much may be missing by chance, and the summary does not warn of it."""

EXERCISED_BY: Final[Mapping[str, tuple[str, str]]] = {
    "prefix": ("hits", "no admission hit anything"),
    "salt": ("salted admissions", "nothing was admitted under a salt"),
    "fork": ("forks", "every fork was refused"),
    "swap": ("sequences resumed", "no sequence was swapped out and back in"),
    "store": ("blocks restored", "nothing came back from the store"),
    "reset": ("resets", "every reset was refused"),
    "restart": ("restarts", "there was no restart"),
    "abort": ("aborts", "no sequence was freed while its step ran"),
    "lost_step": ("lost steps", "no step was lost"),
    "drafts": ("drafts rejected", "no draft was rejected"),
    "rows": ("rows read", "no row was read"),
    "background": ("settle operations", "nothing ended in the background"),
    "failing_moves": ("copies failed", "no copy was asked for that could fail"),
}
"""By capability: the count that shows that it was used, and what is wrong otherwise."""


def unexercised(adapter: type[BlockManagerAdapter], counts: Counter[str]) -> list[str]:
    """What is missing for a proof, in words; empty if nothing is."""
    missing = []
    if not counts["tokens computed"]:
        missing.append("nothing was exercised: no sequence was admitted and computed")
    for capability in adapter.capabilities:
        count, wrong = EXERCISED_BY[capability]
        if not counts[count]:
            missing.append(f"{capability}: {wrong}")
    return missing


def check_exercised(adapter: type[BlockManagerAdapter], counts: Counter[str], rare: Collection[str] = ()) -> None:
    """``AssertionError`` if the run proves nothing of something that the adapter can do and that is not ``rare``."""
    missing = [what for what in unexercised(adapter, counts) if what.partition(":")[0] not in rare]
    enough = counts["examples"] >= EXAMPLES_MIN or not counts["tokens computed"]
    assert not (enough and missing), f"{adapter.__name__}: {'; '.join(missing)}"


def summary(adapter: type[BlockManagerAdapter], counts: Counter[str]) -> str:
    """A few lines for people: how much of what was done, and what the adapter does not claim."""
    done = {name.removesuffix(" operations"): n for name, n in counts.items() if name.endswith(" operations")}
    rest = {
        n: c for n, c in counts.items() if c and not n.endswith(" operations") and n not in ("operations", "examples")
    }
    lines = [f"{adapter.__name__}: {counts['operations']:,} operations in {counts['examples']:,} examples"]
    lines.append(f"  asked for     {_told(done)}")
    lines.append(f"  happened      {_told({n: c for n, c in rest.items() if not n.startswith('unclaimed ')})}")
    lines.append(f"  capabilities  {', '.join(adapter.capabilities) or 'none'}")
    for name, reason in adapter.unclaimed.items():
        lines.append(f"  not claimed   {name}, broken {counts[f'unclaimed {name}']:,} times: {reason}")
    return "\n".join(lines)


def _told(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n:,}" for name, n in sorted(counts.items(), key=lambda item: -item[1]))
