"""Rows that cross: what is exported, and where and when it may land."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from canary import canary_rows
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.blocks import AuxBlocks
from cache_manager.blocks import AuxBlocks
from cache_manager.errors import BlockBusyError, BlockStateError, InvalidInputError, RecordError
from cache_manager.keys import Namespace
from cache_manager.record import RecordHeader, check_record
from cache_manager.spec import AuxBlockDataSpec

SPECS = (AuxBlockDataSpec("routing", (3, 2), "uint8", 4), AuxBlockDataSpec("weights_version", (), "uint32", 4))
P_BLOCK, D_BLOCK = 2, 1


def aux_blocks(version: int = 1) -> AuxBlocks:
    return AuxBlocks(SPECS, device_blocks=4, host_blocks=1, namespace=Namespace("m", version))


def write(aux: AuxBlocks, block: int, offsets: list[int], who: str, *, open_step: bool = False) -> object:
    step = aux.begin_step([block * 4 + o for o in offsets])
    for spec in SPECS:
        step.write(spec.name, canary_rows(spec, [(who, o) for o in offsets]))
    if not open_step:
        step.commit()
    return step


def rows(aux: AuxBlocks | AuxBlocks, block: int) -> list[str | None]:
    """Who wrote each row of the block, by the canary; ``None`` where it is missing in every spec."""
    found: list[str | None] = []
    for o in range(4):
        seen = set()
        for spec in SPECS:
            read = aux.read(spec.name, [block], o, o + 1)
            if read.valid[0]:
                (who,) = [w for w in "PDX" if (canary_rows(spec, [(w, o)]) == read.values).all()]
                seen.add(who)
            else:
                seen.add(None)
        (who,) = seen
        found.append(who)
    return found


def life_of(aux: AuxBlocks, block: int) -> int:
    return int(aux.generations([block])[0])


def exported(offsets: list[int], count: int | None = None) -> tuple[RecordHeader, bytes]:
    """The record of a block in which P wrote ``offsets``; what it exports may not change under anybody."""
    with aux_blocks() as p:
        p.allocate([P_BLOCK], "req")
        write(p, P_BLOCK, offsets, "P")
        key = p.keys.key(None, [1, 2, 3, 4])
        with p.export({key: P_BLOCK}, None if count is None else [count], owner="req") as export:
            (record,) = export.records
            header, payload = record.seal(), bytes(record.payload)
            assert header.origin == p.origins([P_BLOCK])[0] != 0
            del record
        check_record(header, key, p.layout.fingerprint, payload)
        return header, payload


@given(
    st.sets(st.integers(0, 3), min_size=1),
    st.none() | st.integers(1, 4),
    st.sets(st.integers(0, 3)),
    st.sets(st.integers(0, 3)),
    st.sampled_from(("commit", "abort")),
)
def test_a_row_lands_beside_its_own_kv_and_on_no_other_row(
    sent: set, bound: int | None, written: set, stepping: set, end: str
) -> None:
    """Goal: the rows of the KV that is really used win. Method: some rows are there, others are in a step in flight.

    P's KV is in the first ``bound`` tokens, where it was named before; whatever D computed there is D's. Where it was
    not named, it is P's as far as the rows go, unless D has begun to compute.
    """
    header, payload = exported(sorted(sent))
    with aux_blocks() as d:
        d.allocate([D_BLOCK], "req")
        generation = life_of(d, D_BLOCK)
        if bound is not None:
            assert d.bind_origin(D_BLOCK, generation, header.origin, bound)
            assert d.origins([D_BLOCK]) == [header.origin]
        if written:
            write(d, D_BLOCK, sorted(written), "D")
        step = write(d, D_BLOCK, sorted(stepping), "D", open_step=True) if stepping else None
        computed = written | stepping
        if computed:
            assert d.origins([D_BLOCK]) != [header.origin], "what is written here is another computation's"
            came = set() if any(o < (bound or 0) for o in computed) else {o for o in sent if o < (bound or 0)}
        else:
            came = sent
        assert d.install(D_BLOCK, generation, header, payload) == len(came)
        now = {**dict.fromkeys(written, "D"), **dict.fromkeys(stepping, None), **dict.fromkeys(came, "P")}
        assert rows(d, D_BLOCK) == [now.get(o) for o in range(4)]
        assert d.install(D_BLOCK, generation, header, payload) == 0, "a row lands once"
        if step is not None:
            getattr(step, end)()
        now |= dict.fromkeys(stepping, "D" if end == "commit" else None)
        assert rows(d, D_BLOCK) == [now.get(o) for o in range(4)]
        assert d.counters.rows_installed == len(came)
        refused = bool(computed) and (bound is None or any(o < bound for o in computed))
        assert d.counters.installs_of_another_origin_dropped == 2 * refused
        d.assert_consistent()


@pytest.mark.parametrize("tokens", [1, 3])
def test_kv_that_comes_over_what_was_computed_here_takes_its_rows_away(tokens: int) -> None:
    """Goal: no row beside KV that was written over. Method: one row of P comes; D computes the next token behind it;
    then P's KV comes, of the one token or of more."""
    header, payload = exported([0, 1, 2, 3], 1)
    with aux_blocks() as d:
        d.allocate([D_BLOCK], "req")
        life = life_of(d, D_BLOCK)
        assert d.install(D_BLOCK, life, header, payload) == 1
        write(d, D_BLOCK, [1], "D")
        assert rows(d, D_BLOCK) == ["P", "D", None, None]
        assert d.bind_origin(D_BLOCK, life, header.origin, tokens)
        assert rows(d, D_BLOCK) == (["P", "D", None, None] if tokens == 1 else [None] * 4)
        d.assert_consistent()


def test_rows_of_another_origin_get_no_place_beside_the_kv_that_came() -> None:
    """Goal: KV and rows of one computation. Method: KV of A is named, rows of B come; then KV of B, and B's again."""
    (header_a, rows_a), (header_b, rows_b) = exported([0, 1, 2, 3]), exported([0, 1, 2, 3])
    assert header_a.origin != header_b.origin, "two computations of one prompt"
    with aux_blocks() as d:
        d.allocate([D_BLOCK], "req")
        life = life_of(d, D_BLOCK)
        assert d.bind_origin(D_BLOCK, life, header_a.origin, 4)
        assert d.install(D_BLOCK, life, header_b, rows_b) == 0
        assert d.counters.installs_of_another_origin_dropped == 1
        assert d.install(D_BLOCK, life, header_a, rows_a) == 4
        assert d.bind_origin(D_BLOCK, life, header_b.origin, 4)
        assert rows(d, D_BLOCK) == [None] * 4, "the KV of A was written over"
        assert d.install(D_BLOCK, life, header_b, rows_b) == 4


def test_rows_land_in_the_blocks_of_an_engine_too() -> None:
    """Goal: an engine that owns its blocks can be the end that decodes. Method: KV is named, its rows come, twice."""
    header, payload = exported([0, 1, 2, 3])
    with AuxBlocks(SPECS, blocks=4, namespace=Namespace("m", 1)) as d:
        (life,) = d.renew([D_BLOCK]).tolist()
        assert d.install(D_BLOCK, life - 1, header, payload) == 0, "another life"
        assert d.bind_origin(D_BLOCK, life, header.origin, 4)
        assert d.install(D_BLOCK, life, header, payload) == 4
        assert rows(d, D_BLOCK) == ["P"] * 4
        assert d.install(D_BLOCK, life, header, payload) == 0, "a row lands once"


def test_kv_that_is_copied_over_what_was_to_come_gets_none_of_its_rows() -> None:
    """Goal: the same for a copy. Method: name the KV of P, copy half a block of D's over it, then P's rows come."""
    header, payload = exported([0, 1, 2, 3])
    with aux_blocks() as d:
        d.allocate([D_BLOCK, 3], "req")
        write(d, 3, [0, 1, 2, 3], "D")
        assert d.bind_origin(D_BLOCK, life_of(d, D_BLOCK), header.origin, 4)
        d.copy([(3, D_BLOCK)], [2])
        assert d.install(D_BLOCK, life_of(d, D_BLOCK), header, payload) == 0
        assert rows(d, D_BLOCK) == ["D", "D", None, None]


def test_a_row_that_a_device_may_still_write_is_not_filled() -> None:
    """Goal: the fence of a step in place. Method: a step of the life before, a reset, and rows for the life after."""
    with aux_blocks(version=2) as p:
        p.allocate([P_BLOCK], "req")
        write(p, P_BLOCK, [0, 1, 2, 3], "P")
        export = p.export({p.keys.key(None, [1]): P_BLOCK}, owner="req")
        header, payload = export.records[0].seal(), bytes(export.records[0].payload)
        export.commit()
    with aux_blocks() as d:
        d.allocate([D_BLOCK], "req")
        step = d.begin_step([D_BLOCK * 4 + 1, D_BLOCK * 4 + 2], in_place=True)
        d.reset(weights_version=2)
        assert d.install(D_BLOCK, life_of(d, D_BLOCK), header, payload) == 2
        d.region("device").rows[D_BLOCK] = 0xEE  # what the device writes late need not be sound
        assert step.commit() == 0
        for spec in SPECS:
            assert d.read(spec.name, [D_BLOCK]).valid.tolist() == [True, False, False, True]


@pytest.mark.parametrize("origin", [0, 1 << 64, -1, "x", None])
def test_an_origin_that_cannot_be_is_named(origin) -> None:
    with aux_blocks() as d:
        d.allocate([D_BLOCK], "req")
        with pytest.raises(InvalidInputError, match=r"origin: wanted an integer in \[1, 2\*\*64\)"):
            d.bind_origin(D_BLOCK, life_of(d, D_BLOCK), origin, 4)


def test_kv_that_comes_for_another_life_binds_nothing() -> None:
    with aux_blocks() as d:
        d.allocate([D_BLOCK], "req")
        life = life_of(d, D_BLOCK)
        assert not d.bind_origin(D_BLOCK, life + 1, 7, 4)
        with d.begin_copy([(D_BLOCK, 3)]), pytest.raises(BlockBusyError):
            d.bind_origin(D_BLOCK, life, 7, 4)
        d.free("req")
        assert not d.bind_origin(D_BLOCK, life, 7, 4)
        assert d.counters.late_installs_dropped == 2


def test_a_record_for_another_life_is_dropped() -> None:
    header, payload = exported([0, 1, 2, 3])
    with aux_blocks() as d:
        d.allocate([D_BLOCK], "req")
        generation = life_of(d, D_BLOCK)
        d.free("req")
        assert not d.install(D_BLOCK, generation, header, payload)  # nobody holds it
        d.allocate([D_BLOCK], "another")
        assert not d.install(D_BLOCK, generation, header, payload)
        assert rows(d, D_BLOCK) == [None] * 4
        assert d.counters.late_installs_dropped == 2


def test_a_record_from_before_a_reset_is_dropped() -> None:
    """Method: also when the block's life is the right one, because the key is of the older namespace."""
    header, payload = exported([0, 1, 2, 3])
    with aux_blocks() as d:
        d.allocate([D_BLOCK], "req")
        before = life_of(d, D_BLOCK)
        d.reset(weights_version=2)
        assert not d.install(D_BLOCK, before, header, payload)
        assert not d.install(D_BLOCK, life_of(d, D_BLOCK), header, payload)
        assert rows(d, D_BLOCK) == [None] * 4


def test_a_block_in_motion_is_busy() -> None:
    header, payload = exported([0, 1, 2, 3])
    with aux_blocks() as d:
        d.allocate([D_BLOCK], "req")
        generation = life_of(d, D_BLOCK)
        assert d.bind_origin(D_BLOCK, generation, header.origin, 4)
        with d.begin_copy([(D_BLOCK, 3)]), pytest.raises(BlockBusyError):
            d.install(D_BLOCK, generation, header, payload)
        assert d.install(D_BLOCK, generation, header, payload)


def test_a_record_of_another_layout_is_an_error_and_changes_nothing() -> None:
    header, payload = exported([0, 1, 2, 3])
    with aux_blocks() as d:
        d.allocate([D_BLOCK], "req")
        generation = life_of(d, D_BLOCK)
        bad = (
            ({"fingerprint": bytes(16)}, payload),
            ({"valid": header.valid[:8]}, payload),
            ({"valid": b"\xff" * 16}, payload),
            ({}, payload[:-1]),
        )
        for changes, data in bad:
            fields = {f: getattr(header, f) for f in header.__struct_fields__} | changes
            with pytest.raises(RecordError):
                d.install(D_BLOCK, generation, RecordHeader(**fields), data)
        with pytest.raises(InvalidInputError):
            d.install(17, generation, header, payload)
        assert rows(d, D_BLOCK) == [None] * 4


def test_a_partial_block_is_a_snapshot_of_its_rows_and_of_nothing_else() -> None:
    """Goal: later rows may be written, and nobody sees what was in the block before. Method: look at the bytes."""
    with aux_blocks() as p:
        p.allocate([P_BLOCK], "old")
        write(p, P_BLOCK, [0, 1, 2, 3], "X")
        p.free("old")
        p.allocate([P_BLOCK], "req")
        write(p, P_BLOCK, [0, 1, 2], "P")
        key = p.keys.key(None, [1, 2])
        export = p.export({key: P_BLOCK}, [2], owner="req")
        (record,) = export.records
        header = record.seal()
        write(p, P_BLOCK, [3], "P")
        p.free("req")
        p.allocate([P_BLOCK], "next")
        write(p, P_BLOCK, [0, 1, 2, 3], "X")
        assert record.seal() == header
        raw = np.frombuffer(record.payload, np.uint8)[: SPECS[0].block_nbytes].reshape(4, -1)
        assert not raw[2:].any()
        with aux_blocks() as d:
            d.allocate([D_BLOCK], "req")
            assert d.install(D_BLOCK, life_of(d, D_BLOCK), header, record.payload) == 2
            assert rows(d, D_BLOCK) == ["P", "P", None, None]


def test_a_whole_block_is_read_where_it_lies_and_kept_until_it_is_let_go() -> None:
    """Goal: the bytes under a record are its own until nobody reads them. Method: try to change them meanwhile."""
    with aux_blocks() as p:
        p.allocate([P_BLOCK], "req")
        write(p, P_BLOCK, [0, 1, 2, 3], "P")
        key = p.keys.key(None, [1, 2, 3, 4])
        export = p.export({key: P_BLOCK}, owner="req")
        (record,) = export.records
        assert np.shares_memory(np.frombuffer(record.payload, np.uint8), p.region("device").rows)
        assert p.counters.rows_exported == 4
        header = record.seal()
        with pytest.raises(BlockBusyError):
            p.begin_step([P_BLOCK * 4])
        p.free("req")
        with pytest.raises(BlockBusyError):
            p.allocate([P_BLOCK], "next")
        assert (p.moves, p.in_flight) == ([export], 1)
        p.reset(weights_version=2)
        check_record(header, key, p.layout.fingerprint, record.payload)
        del record
        export.commit()
        assert export.records == []
        export.abort()  # harmless
        assert (p.moves, p.in_flight) == ([], 0)
        p.allocate([P_BLOCK], "next")


def test_an_export_that_is_dropped_keeps_its_blocks_and_can_be_found() -> None:
    with aux_blocks() as p:
        p.allocate([P_BLOCK], "req")
        write(p, P_BLOCK, [0, 1, 2, 3], "P")
        p.export({p.keys.key(None, [1]): P_BLOCK}, owner="req")
        gc.collect()
        with pytest.raises(BlockStateError, match="close: wanted nothing in flight"):
            p.close()
        (export,) = p.moves
        export.abort()


def test_an_export_of_a_block_that_a_step_writes_is_refused_where_it_would_be_a_view() -> None:
    """Goal: no view of rows that change. Method: one row of a whole block in a step."""
    with aux_blocks() as p:
        p.allocate([P_BLOCK], "req")
        write(p, P_BLOCK, [0, 1, 2, 3], "P")
        step = write(p, P_BLOCK, [3], "X", open_step=True)
        export = p.export({p.keys.key(None, [1]): P_BLOCK}, owner="req")
        assert not np.shares_memory(np.frombuffer(export.records[0].payload, np.uint8), p.region("device").rows)
        before = export.records[0].seal()
        assert p.in_flight == 1, "a snapshot keeps nothing"
        step.commit()
        assert export.records[0].seal() == before
        write(p, P_BLOCK, [0], "X")
        assert p.origins([P_BLOCK]) != [before.origin], "its content has left, what is written next is another's"


def test_nothing_to_export_is_none() -> None:
    with aux_blocks() as p:
        p.allocate([0, 1], "req")
        write(p, 1, [0, 1, 2, 3], "P")
        old = p.keys.key(None, [9])
        assert p.export({old: 0}, owner="req").records == [None]
        assert p.export({old: 1}, [0], owner="req").records == [None]
        assert p.export({old: 1}, generations=[life_of(p, 1) + 1]).records == [None]
        assert p.counters.stale_blocks == 1
        p.reset(weights_version=2)
        assert p.export({old: 1}, owner="req").records == [None]
        assert p.counters.stale_keys == 1
        with pytest.raises(InvalidInputError):
            p.export({old: 1}, [1, 2], owner="req")


@pytest.mark.parametrize(
    ("life", "message"),
    [
        ({}, "owner, generations: wanted one of them, to say for which life, got neither"),
        ({"owner": "req", "generations": [1]}, "owner, generations: wanted one of them, .* got both"),
        ({"generations": [1, 2]}, "generations: wanted 1, one integer for each block, got 2"),
    ],
)
def test_an_export_says_for_which_life(life, message) -> None:
    with aux_blocks() as p:
        p.allocate([P_BLOCK], "req")
        with pytest.raises(InvalidInputError, match=message):
            p.export({p.keys.key(None, [1]): P_BLOCK}, **life)
        with pytest.raises(BlockStateError, match="one that 'other' holds"):
            p.export({p.keys.key(None, [1]): P_BLOCK}, owner="other")
