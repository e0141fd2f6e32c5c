"""A failure as a short story: the invariant, the operations in words, the tables before and after, the blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache_manager.testing.life.invariants import INVARIANTS

if TYPE_CHECKING:
    from cache_manager.testing.life.world import Table, World


def blocks(table: Table | None) -> str:
    """A table as it is told: ``[b4 b1]``, with a dot for a block that the window has left."""
    if table is None:
        return "-"
    return "[" + " ".join("." if block is None else f"b{block}" for block in table) + "]"


def report(world: World, name: str, what: str) -> str:
    """The whole story of ``world`` up to now, which breaks the invariant ``name``."""
    invariant, adapter = INVARIANTS[name], world.adapter
    lines = [f"{name}: {invariant.claim}", f"  {what}", ""]
    lines.append(f"{adapter.__name__}, {world.capacity} blocks of {world.size} tokens:")
    lines += [f"  {number}. {told}" for number, told in enumerate(world.story, 1)]
    lines += ["", f"  {'tables':<8}{'before line ' + str(len(world.story)):<30}after"]
    for seq in sorted(world.before.tables.keys() | world.after.tables.keys()):
        was, now = world.before.tables.get(seq), world.after.tables.get(seq)
        lines.append(f"  {seq:<8}{blocks(was):<30}{blocks(now)}")
    lines.append(f"  {'free':<8}{world.before.free:<30}{world.after.free}")
    lines += _contents(world)
    if invariant.reports:
        lines += ["", f"Managers elsewhere that broke this: {', '.join(invariant.reports)}"]
    return "\n".join(lines)


def _contents(world: World) -> list[str]:
    """What each block holds, and who holds it."""
    lines = [""]
    for tier, ids in ((world.kv.device, world.adapter.blocks), (world.kv.host, world.adapter.host_blocks)):
        device = tier is world.kv.device
        holders = world.holders(world.after, "device" if device else "host")
        for block in ids:
            cells = [(at, cell) for at, cell in enumerate(tier.get(block, [])) if cell is not None]
            if not cells and block not in holders:
                continue
            whose = "held by " + " and ".join(holders[block]) if block in holders else "held by nobody"
            refs = world.after.refs if device else None
            count = "" if refs is None else f", count {refs.get(block, 0)}"
            lines.append(f"  {'' if device else 'host '}b{block}, {whose}{count}")
            lines += [f"    [{at}] {cell.content}; written in line {cell.line} by {cell.writer}" for at, cell in cells]
    return lines if len(lines) > 1 else []


__all__ = ["blocks", "report"]
