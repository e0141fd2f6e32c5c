"""A failure as a short story: the invariant, the operations in words, the tables before and after, the blocks."""

from __future__ import annotations

from cache_manager.testing.life.invariants import INVARIANTS, InvariantBroken
from cache_manager.testing.life.world import World, blocks


def told(world: World, error: InvariantBroken) -> InvariantBroken:
    """The error with the whole story of ``world``, in which it has just happened."""
    lines = [f"{error.name}: {INVARIANTS[error.name]}", f"  {error.what}", ""]
    lines.append(f"{world.adapter.__name__}, {world.capacity} blocks of {world.size} tokens:")
    lines += [f"  {number}. {line}" for number, line in enumerate(world.story, 1)]
    lines += ["", f"  {'tables':<8}{'before line ' + str(len(world.story)):<30}after"]
    for seq in sorted(world.before.tables.keys() | world.after.tables.keys()):
        was, now = world.before.tables.get(seq), world.after.tables.get(seq)
        lines.append(f"  {seq:<8}{blocks(was):<30}{blocks(now)}")
    lines += [f"  {'free':<8}{world.before.free:<30}{world.after.free}", ""]
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
    return InvariantBroken(error.name, error.what, error.program, "\n".join(lines).rstrip())
