"""The claims that are checked after an operation, and inside one. Each check names the invariant that it finds broken
(:mod:`cache_manager.testing.life.invariants`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Collected
from functools import partial
from itertools import takewhile

from cache_manager.testing.life.canary import Content
from cache_manager.testing.life.world import Sequence, World, blocks


def check_all(world: World, *touched: str) -> None:
    """Every claim that holds between operations; the operation that ends here may change ``touched``."""
    for name in world.before.tables.keys() & world.after.tables.keys() - set(touched):
        was = world.before.tables[name]
        now = world.after.tables[name]
        if was != now:
            world.fail("others_untouched", f"{name} had {blocks(was)}, and has {blocks(now)}")
    for sequence in world.live.values():
        check_table(world, sequence)
    check_accounts(world)
    for sequence in world.live.values():
        check_content(world, sequence)
        if world.can("rows"):
            check_rows(world, sequence)
    try:
        world.manager.check()
    except Exception as error:  # noqa: BLE001 - whatever the manager's own check raises is the finding
        world.fail("own_check", repr(error))


def check_unchanged(world: World) -> None:
    """The operation was refused or failed: nothing may have changed."""
    told = {"tables": "the tables were", "host_free": "free host blocks were"}
    if not world.can("background"):
        told |= {"free": "free blocks were", "refs": "reference counts were"}
    for what, words in told.items():
        was = getattr(world.before, what)
        now = getattr(world.after, what)
        if was != now:
            world.fail("refusal_changes_nothing", f"{words} {was}, and then {now}")
    check_all(world, *world.live)  # every table was compared above


# -------------------------------------------------------------------- accounts


def check_table(world: World, sequence: Sequence) -> None:
    """The sequence's table names blocks of the pool, and enough of them."""
    table = world.after.tables[sequence.name]
    held = [block for block in table if block is not None]
    pool = world.adapter.host_blocks if sequence.swapped else world.adapter.blocks
    if len(set(held)) != len(held) or any(block not in pool for block in held):
        world.fail("ids_are_blocks", f"{sequence.name} has {blocks(table)}")
    if len(table) * world.size < sequence.computed:
        world.fail("table_covers", f"{sequence.name} has computed {sequence.computed} tokens, and has {blocks(table)}")


def check_accounts(world: World) -> None:
    """Free and held blocks are all blocks, and counts agree with tables."""
    seen = world.after
    held = world.holders(world.after)
    if (free := world.ask("free_ids")) is not None:
        twice = [f"b{block}" for block, n in Counter(free).items() if n > 1]
        both = [f"b{block}" for block in sorted(held.keys() & set(free))]
        if twice or both:
            world.fail("none_free_and_held", f"free twice: {twice}; free and held: {both}")
    if more := seen.free + len(held) - world.capacity:
        lost = [f"b{block}" for block in world.adapter.blocks if block not in held and block not in (free or held)]
        wrong = f"{more} counted twice" if more > 0 else f"{-more} lost"
        which = f" ({', '.join(lost)})" if lost and free is not None else ""
        counted = f"{seen.free} free, {len(held)} held, of {world.capacity} blocks"
        world.fail("no_block_lost", f"{counted}: {wrong}{which}")
    for block in () if seen.refs is None else seen.refs.keys() | held.keys():
        count = (seen.refs or {}).get(block, 0)
        holders = held.get(block, ())
        if count != len(holders):
            whose = " and ".join(holders) or "nobody"
            world.fail("ref_count_is_holders", f"the count of b{block} is {count}, held by {whose}")
    if seen.host_free is not None:
        swapped = len(world.holders(seen, "host"))
        total = len(world.adapter.host_blocks)
        if seen.host_free + swapped != total:
            world.fail("host_conserved", f"{seen.host_free} free and {swapped} held, of {total} host blocks")
    world.counts["full pools"] += seen.free == 0
    world.counts["blocks shared"] += any(len(names) > 1 for names in held.values())


# -------------------------------------------------------------------- content


def check_content(world: World, sequence: Sequence, *, hit: bool = False) -> None:
    """The sequence's blocks hold the right content at each position that it will read again; ``hit``: it has just got
    them."""
    window = world.adapter.window
    for position in range(0 if window is None else max(0, sequence.computed - window + 1), sequence.computed):
        block, cell = world.at(sequence, position)
        wanted = sequence.contents[position]
        if cell is not None and cell.content is wanted:
            continue
        if block is None:
            table = blocks(world.after.tables[sequence.name])
            world.fail("table_covers", f"{sequence.name} has no block for position {position}: {table}")
            continue
        where = f"{'host ' if sequence.swapped else ''}b{block}[{position % world.size}]"
        if cell is None:
            name = "hit_was_written"
            holds = f"{where} holds nothing that was computed"
        else:
            name = _why(cell.content, wanted)
            holds = f"{where} holds {cell.content}, {cell.written}"
        world.fail(name if hit else "content_survives", f"{holds}; {sequence.name} needs {wanted}")


def _why(found: Content, wanted: Content) -> str:
    """The invariant that a hit with ``found`` in place of ``wanted`` breaks."""
    if found.tokens != wanted.tokens:
        return "hit_is_its_prefix"
    return "salts_apart" if found.salt != wanted.salt else "reset_forgets"


def check_rows(world: World, sequence: Sequence) -> None:
    """The rows that are read come from the passes that made the KV beside them."""
    if sequence.waiting or not sequence.computed:
        return
    room = len(world.after.tables[sequence.name]) * world.size
    rows = world.ask("read_rows", sequence.name, 0, room)
    if len(rows) != room:
        world.fail("rows_follow_kv", f"{sequence.name}: {len(rows)} rows were read of {room} positions")
    for position, row in enumerate(rows):
        cell = world.at(sequence, position)[1] if position < sequence.computed else None
        where = f"{sequence.name} at position {position}"
        if cell is None:
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
            world.counts["rows"] += 1


# -------------------------------------------------------------------- inside an operation


def check_copies(world: World, kind: str, pairs: list[tuple[int, int]]) -> None:
    """The copies that the manager asks for, before they are made."""
    pools = {"device": world.adapter.blocks, "host": world.adapter.host_blocks}
    source_tier = "host" if kind == "swap_in" else "device"
    target_tier = "host" if kind == "swap_out" else "device"
    given = world.holders(world.after, source_tier)
    taken = world.holders(world.after, target_tier)
    bad = [
        (source, target)
        for source, target in pairs
        if source not in pools[source_tier]
        or source not in given
        or target not in pools[target_tier]
        or target in taken
    ]
    if bad or len({target for _, target in pairs}) != len(pairs):
        what = f"of {bad}, a source has no owner or a target has one" if bad else "a block is the target of two"
        world.fail("copies_are_sound", f"{kind} {pairs}: {what}")


def check_fresh(world: World, name: str, first: int) -> None:
    """Blocks that ``name`` has from index ``first`` on, and did not have before, belong to no other sequence."""
    had = world.before.tables.get(name, ())
    now = world.after.tables
    others = {
        block
        for other, table in world.before.tables.items()
        if other != name and not world.live[other].swapped
        for block in table
        if block in now.get(other, ())  # a window may have left it meanwhile
    }
    for block in now[name][first:]:
        if block is not None and block not in had and block in others:
            world.fail("given_once", f"b{block} was handed to {name} while another sequence holds it")


def check_hit(world: World, sequence: Sequence, cached: int) -> None:
    """The tokens that the manager calls cached are there; from here on they count as computed."""
    total = len(sequence.tokens)
    had = sequence.computed
    if not had <= cached < total or cached % world.size:
        world.fail("hit_leaves_one", f"{cached} of {total} tokens need no computing, in blocks of {world.size}")
    for token in sequence.tokens[had:cached]:
        before = sequence.contents[-1] if sequence.contents else world.beginning(sequence.salt)
        sequence.contents.append(before.then(token, world.version))
    check_content(world, sequence, hit=True)


def check_found(world: World, sequence: Sequence, cached: int) -> None:
    """The longest run of full blocks that another running sequence holds was hit."""
    wanted = []
    at = world.beginning(sequence.salt)
    for token in sequence.tokens:
        at = at.then(token, world.version)
        wanted.append(at)

    def holds(other: Sequence, stop: int) -> bool:
        """Whether ``other`` has the prompt's block that ends at ``stop``, with its rows where a hit needs them."""
        if stop > other.computed or other.contents[stop - 1] is not wanted[stop - 1]:
            return False
        cells = (world.at(other, position)[1] for position in range(stop - world.size, stop))
        return not world.adapter.hits_need_rows or all(cell is not None and cell.row for cell in cells)

    for other in world.live.values():
        if other is not sequence and not other.swapped and not other.waiting:
            stops = range(world.size, len(wanted), world.size)
            run = len(list(takewhile(partial(holds, other), stops)))
            if run * world.size > cached:
                world.fail(
                    "held_is_found", f"{other.name} holds {run} full blocks of that prefix, and {cached} tokens hit"
                )


def check_written(world: World, sequence: Sequence, start: int, slots: Collected[tuple[int, int]]) -> None:
    """The slots that a pass is about to write, of the positions from ``start`` on."""
    holders = world.holders(world.after)
    name = sequence.name
    for position, (block, offset) in enumerate(slots, start):
        if block not in world.adapter.blocks or not 0 <= offset < world.size:
            table = blocks(world.after.tables[name])
            world.fail("table_covers", f"{name} has no slot for position {position}: {table}")
        if others := [other for other in holders.get(block, ()) if other != name]:
            whose = f"b{block}, which {' and '.join(others)} has"
            world.fail("shared_not_written", f"{name} is to write position {position} into {whose}")
