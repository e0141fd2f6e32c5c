"""What is claimed after an operation, and what is checked inside one. Each check names the invariant that it finds
broken (:mod:`cache_manager.testing.life.invariants`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Collected

from cache_manager.testing.life.canary import Content
from cache_manager.testing.life.world import Sequence, World, blocks

Slots = Collected[tuple[int, int]]


def check_all(world: World, *touched: str) -> None:
    """Every claim that holds between operations, the one that ends here being about ``touched``."""
    for name in world.before.tables.keys() & world.after.tables.keys() - set(touched):
        was, now = world.before.tables[name], world.after.tables[name]
        if was != now:
            world.fail("others_untouched", f"{name} had {blocks(was)}, and has {blocks(now)}")
    for sequence in world.live.values():
        check_table(world, sequence)
    check_accounts(world)
    for sequence in world.live.values():
        check_content(world, sequence, needed(world, sequence))
        if world.can("rows"):
            check_rows(world, sequence)
    try:
        world.manager.check()
    except Exception as error:  # noqa: BLE001 - whatever the manager's own check raises is the finding
        world.fail("own_check", repr(error))


def check_unchanged(world: World) -> None:
    """The operation was refused or failed."""
    for what in ("tables", "host_free", *(() if world.can("background") else ("free", "refs"))):
        was, now = getattr(world.before, what), getattr(world.after, what)
        if was != now:
            world.fail("refusal_changes_nothing", f"{_NAMES[what]} {was}, and then {now}")
    check_all(world, *world.live)  # every table was compared above


_NAMES = {
    "tables": "the tables were",
    "free": "free blocks were",
    "host_free": "free host blocks were",
    "refs": "reference counts were",
}

# -------------------------------------------------------------------- accounts


def check_table(world: World, sequence: Sequence) -> None:
    """The sequence's blocks are blocks, and enough."""
    table = world.after.tables[sequence.name]
    held = [block for block in table if block is not None]
    pool = world.adapter.host_blocks if sequence.swapped else world.adapter.blocks
    if len(set(held)) != len(held) or any(block not in pool for block in held):
        world.fail("ids_are_blocks", f"{sequence.name} has {blocks(table)}")
    if len(table) * world.size < sequence.computed:
        world.fail("table_covers", f"{sequence.name} has computed {sequence.computed} tokens, and has {blocks(table)}")


def check_accounts(world: World) -> None:
    """Free and held blocks are all blocks, and counts are what tables say."""
    seen, held = world.after, world.holders(world.after)
    if (free := world.ask("free_ids")) is not None:
        twice = [f"b{block}" for block, n in Counter(free).items() if n > 1]
        both = [f"b{block}" for block in sorted(held.keys() & set(free))]
        if twice or both:
            world.fail("none_free_and_held", f"free twice: {twice}; free and held: {both}")
    if (found := seen.free + len(held)) != world.capacity:
        lost = [f"b{block}" for block in world.adapter.blocks if block not in held and block not in (free or held)]
        which = f" ({', '.join(lost)})" if lost and free is not None else ""
        wrong = (
            f"{found - world.capacity} counted twice" if found > world.capacity else f"{world.capacity - found} lost"
        )
        counted = f"{seen.free} free, {len(held)} held, of {world.capacity} blocks"
        world.fail("no_block_lost", f"{counted}: {wrong}{which}")
    if seen.refs is not None:
        for block in seen.refs.keys() | held.keys():
            if seen.refs.get(block, 0) != len(held.get(block, ())):
                holders = " and ".join(held.get(block, ["nobody"]))
                world.fail(
                    "ref_count_is_holders", f"the count of b{block} is {seen.refs.get(block, 0)}, held by {holders}"
                )
    if seen.host_free is not None:
        swapped = world.holders(seen, "host")
        if seen.host_free + len(swapped) != len(world.adapter.host_blocks):
            total = len(world.adapter.host_blocks)
            world.fail("host_conserved", f"{seen.host_free} free and {len(swapped)} held, of {total} host blocks")
    world.counts["full pools"] += seen.free == 0
    world.counts["blocks shared"] += any(len(names) > 1 for names in held.values())


# -------------------------------------------------------------------- content


def needed(world: World, sequence: Sequence) -> range:
    """The computed positions that the sequence will read again."""
    window = world.adapter.window
    return range(0 if window is None else max(0, sequence.computed - window + 1), sequence.computed)


def check_content(world: World, sequence: Sequence, positions: range, *, hit: bool = False) -> None:
    """The sequence's blocks hold, at these positions, what they must; ``hit``: it has just been handed them."""
    table, size = world.after.tables[sequence.name], world.size
    tier = world.kv.host if sequence.swapped else world.kv.device
    for position in positions:
        at = position // size
        block = table[at] if at < len(table) else None
        if block is None:
            world.fail("table_covers", f"{sequence.name} has no block for position {position}: {blocks(table)}")
            continue
        cell, wanted = world.kv.cell(tier, block, position % size), sequence.contents[position]
        if cell is not None and cell.content is wanted:
            continue
        where = f"{'host ' if sequence.swapped else ''}b{block}[{position % size}]"
        if cell is None:
            name = "hit_was_written" if hit else "content_survives"
            world.fail(name, f"{where} holds nothing that was computed; {sequence.name} needs {wanted}")
            continue
        name = _why(cell.content, wanted) if hit else "content_survives"
        holds = f"{where} holds {cell.content}, written in line {cell.line} by {cell.writer}"
        world.fail(name, f"{holds}; {sequence.name} needs {wanted}")


def _why(found: Content, wanted: Content) -> str:
    """Which invariant a hit breaks that hands over ``found`` in place of ``wanted``."""
    if found.tokens != wanted.tokens:
        return "hit_is_its_prefix"
    return "salts_apart" if found.salt != wanted.salt else "reset_forgets"


def check_rows(world: World, sequence: Sequence) -> None:
    """The rows that are read are of the passes that made the KV beside them."""
    if sequence.waiting or not sequence.computed:
        return
    table, size = world.after.tables[sequence.name], world.size
    tier = world.kv.host if sequence.swapped else world.kv.device
    room = len(table) * size
    rows = list(world.ask("read_rows", sequence.name, 0, room))
    if len(rows) != room:
        world.fail("rows_follow_kv", f"{sequence.name}: {len(rows)} rows were read of {room} positions")
    for position, row in enumerate(rows):
        block = table[position // size]
        cell = None if block is None else world.kv.cell(tier, block, position % size)
        where = f"{sequence.name} at position {position}"
        if position >= sequence.computed or cell is None:
            if row is not None:
                world.fail("rows_follow_kv", f"{where}: row {row} of a token that is not computed")
            continue
        old = cell.content.version != world.version
        if row is None:
            if cell.row and not old:
                world.fail("rows_are_kept", f"{where}: the row is missing; {cell.content} is there")
        elif old:
            world.fail("reset_forgets", f"{where}: row {row} is of weights {cell.content.version}")
        elif row != cell.serial:
            world.fail("rows_follow_kv", f"{where}: row {row} is another pass's, the KV is of {cell.serial}")
        else:
            world.counts["rows read"] += 1


# -------------------------------------------------------------------- inside an operation


def check_copies(world: World, kind: str, pairs: list[tuple[int, int]]) -> None:
    """The copies that the manager asks for, before they are made."""
    out, back = kind == "swap_out", kind == "swap_in"
    device, host = world.adapter.blocks, world.adapter.host_blocks
    from_pool, to_pool = (host if back else device), (host if out else device)
    given = world.holders(world.after, "host" if back else "device")
    taken = world.holders(world.after, "host" if out else "device")
    targets = [target for _, target in pairs]
    bad = [
        (source, target)
        for source, target in pairs
        if source not in from_pool or source not in given or target not in to_pool or target in taken
    ]
    if bad or len(set(targets)) != len(targets):
        what = f"of {bad}, a source has no owner or a target has one" if bad else "a block is the target of two"
        world.fail("copies_are_sound", f"{kind} {pairs}: {what}")


def check_fresh(world: World, name: str, first: int) -> None:
    """Blocks that ``name`` has from index ``first`` on, and did not have before, are nobody else's."""
    had, now = set(world.before.tables.get(name, ())), world.after.tables
    tables = [(now.get(other, ()), t) for other, t in world.before.tables.items() if not world.live[other].swapped]
    others = {b for after, t in tables if after is not now[name] for b in t if b in after}  # a window may leave one
    for block in world.after.tables[name][first:]:
        if block is not None and block not in had and block in others:
            world.fail("given_once", f"b{block} was handed to {name} while another sequence holds it")


def check_hit(world: World, sequence: Sequence, cached: int) -> None:
    """What the manager says is cached is there; it is what the sequence has computed from here on."""
    total, had = len(sequence.tokens), sequence.computed
    if not had <= cached < total or (cached % world.size and not world.adapter.partial_hits):
        world.fail("hit_leaves_one", f"{cached} of {total} tokens need no computing, in blocks of {world.size}")
    for token in sequence.tokens[had:cached]:
        before = sequence.contents[-1] if sequence.contents else world.beginning(sequence.salt)
        sequence.contents.append(before.then(token, world.version))
    check_content(world, sequence, needed(world, sequence), hit=True)


def check_found(world: World, sequence: Sequence, cached: int) -> None:
    """The longest run of full blocks that another running sequence holds was hit."""
    size, wanted, at = world.size, [], world.beginning(sequence.salt)
    for token in sequence.tokens:
        at = at.then(token, world.version)
        wanted.append(at)
    most = (len(wanted) - 1) // size
    for other in world.live.values():
        if other is sequence or other.swapped or other.waiting:
            continue
        run = 0
        while run < most and (run + 1) * size <= other.computed:
            if other.contents[(run + 1) * size - 1] is not wanted[(run + 1) * size - 1]:
                break
            if world.adapter.hits_need_rows and not _has_rows(world, other, run):
                break
            run += 1
        if run * size > cached:
            world.fail("held_is_found", f"{other.name} holds {run} full blocks of that prefix, and {cached} tokens hit")


def _has_rows(world: World, sequence: Sequence, index: int) -> bool:
    block = world.before.tables[sequence.name][index]
    cells = [] if block is None else world.kv.device.get(block, [])
    return all(cell is not None and cell.row for cell in cells)


def check_written(world: World, sequence: Sequence, start: int, slots: Slots) -> None:
    """The slots that a pass is about to write, of the positions from ``start`` on."""
    holders = world.holders(world.after)
    for position, (block, offset) in enumerate(slots, start):
        if block not in world.adapter.blocks or not 0 <= offset < world.size:
            table = blocks(world.after.tables[sequence.name])
            world.fail("table_covers", f"{sequence.name} has no slot for position {position}: {table}")
        others = [name for name in holders.get(block, ()) if name != sequence.name]
        if others:
            also = " and ".join(others)
            world.fail(
                "shared_not_written", f"{sequence.name} is to write position {position} into b{block}, which {also} has"
            )
