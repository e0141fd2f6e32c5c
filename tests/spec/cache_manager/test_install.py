"""Rows that cross: what is exported, and where and when it may land."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from canary import canary_rows
from hypothesis import given
from hypothesis import strategies as st
from kv import SlotKV
from stopped import interrupt
from watched_region import watch_rows

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import BlockBusyError, InvalidInputError, RecordError
from cache_manager.keys import Namespace
from cache_manager.record import RecordHeader, check_record
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.step import Step

SPECS = (AuxBlockDataSpec("routing", (3, 2), "uint8", 4), AuxBlockDataSpec("weights_version", (), "uint32", 4))
P_BLOCK, D_BLOCK = 2, 1


def new_blocks(version: int = 1) -> AuxBlocks:
    return AuxBlocks(SPECS, blocks=4, host_blocks=1, namespace=Namespace("m", version))


def write(engine: AuxBlocks, block: int, offsets: list[int], who: str, *, open_step: bool = False) -> Step:
    step = engine.begin_step([block * 4 + o for o in offsets])
    for spec in SPECS:
        step.write(spec.name, canary_rows(spec, [(who, o) for o in offsets]))
    if not open_step:
        step.commit()
    return step


def rows(engine: AuxBlocks, block: int) -> list[str | None]:
    """The writer of each row of the block, by the canary; ``None`` where it is missing in every spec."""
    found: list[str | None] = []
    for o in range(4):
        seen = set()
        for spec in SPECS:
            read = engine.read(spec.name, [block], o, o + 1)
            if read.valid[0]:
                (who,) = [w for w in "PDX" if (canary_rows(spec, [(w, o)]) == read.values).all()]
                seen.add(who)
            else:
                seen.add(None)
        (who,) = seen
        found.append(who)
    return found


def renewed(engine: AuxBlocks, block: int = D_BLOCK) -> int:
    (life,) = engine.renew([block]).tolist()
    return int(life)


def exported(offsets: Iterable[int], count: int | None = None, version: int = 1) -> tuple[RecordHeader, bytes]:
    """The record of a block in which P wrote ``offsets``."""
    with new_blocks(version) as p:
        life = renewed(p, P_BLOCK)
        write(p, P_BLOCK, sorted(offsets), "P")
        key = p.keys.key(None, [1, 2, 3, 4])
        (record,) = p.exchange.export({key: P_BLOCK}, [life], None if count is None else [count])
        header, payload = record.seal(), bytes(record.payload)
        assert header.origin == p.exchange.origins([P_BLOCK])[0] != 0
        check_record(header, key, p.layout.fingerprint, payload)
        return header, payload


@given(
    st.sets(st.integers(0, 3), min_size=1),
    st.booleans(),
    st.sets(st.integers(0, 3)),
    st.sets(st.integers(0, 3)),
    st.sampled_from(("commit", "abort")),
)
def test_a_row_lands_beside_its_own_kv_and_on_no_other_row(
    sent: set, bound: bool, written: set, stepping: set, end: str
) -> None:
    """Goal: the rows of the KV that is really used win. Method: P's KV is named or not; D has written some rows, others
    are in a step in flight; then P's rows come. They land unless D has begun to compute in the block."""
    header, payload = exported(sent)
    with new_blocks() as d:
        generation = renewed(d)
        if bound:
            assert d.exchange.bind_origin(D_BLOCK, generation, header.origin)
            assert d.exchange.origins([D_BLOCK]) == [header.origin]
        if written:
            write(d, D_BLOCK, sorted(written), "D")
        step = write(d, D_BLOCK, sorted(stepping), "D", open_step=True) if stepping else None
        computed = written | stepping
        came = set() if computed else sent
        if computed:
            assert d.exchange.origins([D_BLOCK]) != [header.origin], "what is written here is another computation's"
        assert d.exchange.install(D_BLOCK, generation, header, payload) == len(came)
        now = {**dict.fromkeys(written, "D"), **dict.fromkeys(stepping, None), **dict.fromkeys(came, "P")}
        assert rows(d, D_BLOCK) == [now.get(o) for o in range(4)]
        assert d.exchange.install(D_BLOCK, generation, header, payload) == 0, "a row lands once"
        if step is not None:
            getattr(step, end)()
        now |= dict.fromkeys(stepping, "D" if end == "commit" else None)
        assert rows(d, D_BLOCK) == [now.get(o) for o in range(4)]
        assert d.counters.rows_installed == len(came)
        assert d.counters.installs_of_another_origin_dropped == 2 * bool(computed)
        d.assert_consistent()


def test_kv_that_comes_over_what_was_computed_here_takes_its_rows_away() -> None:
    """Goal: no row beside KV that was written over. Method: one row of P comes; D computes the next token behind it;
    then P's KV comes, and its rows."""
    header, payload = exported(range(4), 1)
    with new_blocks() as d:
        life = renewed(d)
        assert d.exchange.install(D_BLOCK, life, header, payload) == 1
        write(d, D_BLOCK, [1], "D")
        assert rows(d, D_BLOCK) == ["P", "D", None, None]
        assert d.exchange.bind_origin(D_BLOCK, life, header.origin)
        assert rows(d, D_BLOCK) == [None] * 4
        assert d.exchange.install(D_BLOCK, life, header, payload) == 1
        assert rows(d, D_BLOCK) == ["P", None, None, None]
        d.assert_consistent()


def test_rows_of_another_origin_get_no_place_beside_the_kv_that_came() -> None:
    """Goal: KV and rows of one computation. Method: KV of A is named, rows of B come; then KV of B, and B's again."""
    (header_a, rows_a), (header_b, rows_b) = exported(range(4)), exported(range(4))
    assert header_a.origin != header_b.origin, "two computations of one prompt"
    with new_blocks() as d:
        life = renewed(d)
        assert d.exchange.bind_origin(D_BLOCK, life, header_a.origin)
        assert d.exchange.install(D_BLOCK, life, header_b, rows_b) == 0
        assert d.counters.installs_of_another_origin_dropped == 1
        assert d.exchange.install(D_BLOCK, life, header_a, rows_a) == 4
        assert d.exchange.bind_origin(D_BLOCK, life, header_b.origin)
        assert rows(d, D_BLOCK) == [None] * 4, "the KV of A was written over"
        assert d.exchange.install(D_BLOCK, life, header_b, rows_b) == 4


def test_late_rows_land_beside_no_kv_that_was_computed_here() -> None:
    """Goal: rows that come after a pass has begun to compute in their block are missing. Method: one token's KV has
    come; the next one is computed here and its row rejected; the origin is asked; then rows of both come."""
    header, payload = exported(range(4))
    with new_blocks() as d:
        life = renewed(d)
        assert d.exchange.bind_origin(D_BLOCK, life, header.origin)
        write(d, D_BLOCK, [1], "D", open_step=True).commit(np.array([False]))
        assert d.exchange.origins([D_BLOCK]) != [header.origin]
        assert d.exchange.install(D_BLOCK, life, header, payload) == 0
        assert rows(d, D_BLOCK) == [None] * 4


@pytest.mark.parametrize("then", ["given out", "named otherwise"])
def test_what_was_to_come_for_other_kv_does_not_come(then: str) -> None:
    """Goal: KV that came once proves nothing about the KV that is there now. Method: KV of P comes; the block is given
    out, or its KV gets another name; D computes a token after the received ones; then P's rows come."""
    header, payload = exported(range(4))
    with new_blocks() as d:
        life = renewed(d)
        assert d.exchange.bind_origin(D_BLOCK, life, header.origin)
        if then == "given out":
            life = renewed(d)
        else:
            d.exchange.name_origins([D_BLOCK], [life], np.array([header.origin ^ 1], np.uint64))
        write(d, D_BLOCK, [3], "D")
        assert d.exchange.install(D_BLOCK, life, header, payload) == 0
        assert rows(d, D_BLOCK) == [None, None, None, "D"]
        assert d.counters.installs_of_another_origin_dropped == 1


@pytest.mark.parametrize("computed", ["committed", "in flight", "received first"])
@pytest.mark.parametrize(
    "lost", ["forgotten", "all forgotten", "slots unknown", "copied over", "copied over by nothing", "interrupted"]
)
def test_rows_of_another_pass_do_not_land_beside_kv_whose_rows_are_lost(computed: str, lost: str) -> None:
    """Goal: a block whose rows are forgotten still has its KV. Method: D computes a block, or computes again what P
    sent; its rows are lost in each way; then P's rows come late. In a new life, or after a reset, they land."""
    header, payload = exported(range(4))
    with new_blocks() as d:
        life = renewed(d)
        if computed == "received first":
            assert d.exchange.bind_origin(D_BLOCK, life, header.origin)
        step = write(d, D_BLOCK, [0, 1, 2, 3], "D", open_step=computed == "in flight")
        if lost == "forgotten":
            d.forget([D_BLOCK])
        elif lost == "all forgotten":
            d.forget()
        elif lost == "slots unknown":
            assert d.write_step(np.array(["x"]), {}) == 0
        elif lost == "interrupted":
            interrupt(d, P_BLOCK)
        else:
            if lost == "copied over":
                renewed(d, P_BLOCK)
            d.copy([(P_BLOCK, D_BLOCK)])  # from a block without rows, or without a life
        assert d.exchange.install(D_BLOCK, life, header, payload) == 0
        step.abort()
        assert d.exchange.install(D_BLOCK, life, header, payload) == 0
        assert rows(d, D_BLOCK) == [None] * 4
        assert d.counters.installs_of_another_origin_dropped == 2
        d.assert_consistent()
        assert d.exchange.install(D_BLOCK, renewed(d), header, payload) == 4


@pytest.mark.parametrize("how", ["a copy of what was never given out", "slots unknown", "interrupted"])
def test_rows_do_not_land_beside_kv_that_nobody_named(how: str) -> None:
    """Goal: the same where no origin was there before. Method: a block just given out, which a copy, an unreadable
    step, or an interrupted call may have written; then rows come."""
    header, payload = exported(range(4))
    with new_blocks() as d:
        life = renewed(d)
        if how == "slots unknown":
            assert d.write_step(np.array(["x"]), {}) == 0
        elif how == "interrupted":
            interrupt(d, P_BLOCK)
        else:
            d.copy([(P_BLOCK, D_BLOCK)])
        assert d.exchange.install(D_BLOCK, life, header, payload) == 0


def test_a_late_step_does_not_rename_the_next_life() -> None:
    """Goal: a step of an older life costs the new one nothing. Method: a step is in flight; the block is given out anew
    and P's KV comes; the step commits; P's rows come."""
    header, payload = exported(range(4))
    with new_blocks() as d:
        renewed(d)
        step = write(d, D_BLOCK, [0], "D", open_step=True)
        life = renewed(d)
        assert d.exchange.bind_origin(D_BLOCK, life, header.origin)
        assert step.commit() == 0
        assert d.exchange.origins([D_BLOCK]) == [header.origin]
        assert d.exchange.install(D_BLOCK, life, header, payload) == 4
        assert rows(d, D_BLOCK) == ["P"] * 4


def test_a_pass_in_flight_at_a_reset_keeps_its_blocks() -> None:
    """Goal: as above, where the pass of the old weights still writes. Method: a step, a reset, rows of the new weights
    before and after the step's end; they land in the block that no pass was writing."""
    header, payload = exported(range(4), version=2)
    with new_blocks() as d:
        life, other = renewed(d), renewed(d, 0)
        step = write(d, D_BLOCK, [2], "D", open_step=True)
        write(d, 0, [2], "D")
        d.reset(weights_version=2)
        assert d.exchange.install(D_BLOCK, life, header, payload) == 0
        assert d.exchange.install(0, other, header, payload) == 4
        assert step.commit() == 0
        assert d.exchange.install(D_BLOCK, life, header, payload) == 0
        d.assert_consistent()


def test_a_row_that_a_device_may_still_write_is_not_filled() -> None:
    """Goal: the fence of a step in place. Method: a step of the life before, with a slot that was dropped; a reset;
    then rows for the life after, before and after the step's end."""
    header, payload = exported(range(4), version=2)
    with new_blocks() as d:
        renewed(d)
        step = d.begin_step([D_BLOCK * 4 + o for o in (1, 2, 0, 0)], in_place=True)
        d.reset(weights_version=2)
        life = renewed(d)
        with pytest.raises(BlockBusyError, match="a step of before"):
            d.exchange.install(D_BLOCK, life, header, payload)
        d.region("device").rows[D_BLOCK] = 0xEE  # the late writes of the device need not be sound
        assert step.commit() == 0
        assert rows(d, D_BLOCK) == [None] * 4
        assert d.exchange.install(D_BLOCK, life, header, payload) == 4, "as a crossing tries again"
        assert rows(d, D_BLOCK) == ["P"] * 4


@pytest.mark.parametrize("after", ["renew", "reset", "never given out"])
def test_what_comes_for_another_life_is_dropped(after: str) -> None:
    """Goal: KV and rows land only in the life that they were requested for. Method: another life, an older namespace's
    key, and a block that was never given out."""
    header, payload = exported(range(4))
    with new_blocks() as d:
        life, block = renewed(d), D_BLOCK
        if after == "renew":
            renewed(d)
        elif after == "reset":
            d.reset(weights_version=2)
        else:
            life, block = 0, 0
        assert not d.exchange.install(block, life, header, payload)
        if after != "reset":  # which leaves a block in its life: KV that comes for it is KV of the new weights
            assert not d.exchange.bind_origin(block, life, header.origin)
        assert rows(d, block) == [None] * 4
        assert d.counters.late_installs_dropped == 2 - (after == "reset")


def test_a_block_into_which_bytes_are_copied_is_busy() -> None:
    """Goal: nothing lands among bytes that are being copied. Method: both calls, when bytes have been copied."""
    header, payload = exported(range(4))
    refused = []
    with new_blocks() as d:
        life, _ = renewed(d), renewed(d, 3)
        region = d.region("device")

        def happens() -> None:
            for call in (
                lambda: d.exchange.bind_origin(D_BLOCK, life, header.origin),
                lambda: d.exchange.install(D_BLOCK, life, header, payload),
            ):
                with pytest.raises(BlockBusyError):
                    call()
                refused.append(call)

        watch_rows(region, happens)
        d.copy([(3, D_BLOCK)])
        watch_rows(region, None)
        assert len(refused) == 2
        assert d.exchange.bind_origin(D_BLOCK, life, header.origin)
        assert d.exchange.install(D_BLOCK, life, header, payload) == 4


def test_a_record_of_another_layout_is_an_error_and_changes_nothing() -> None:
    header, payload = exported(range(4))
    with new_blocks() as d:
        life = renewed(d)
        bad = (
            ({"fingerprint": bytes(16)}, payload),
            ({"valid": header.valid[:8]}, payload),
            ({"valid": b"\xff" * 16}, payload),
            ({}, payload[:-1]),
        )
        for changes, data in bad:
            fields = {f: getattr(header, f) for f in header.__struct_fields__} | changes
            with pytest.raises(RecordError):
                d.exchange.install(D_BLOCK, life, RecordHeader(**fields), data)
        with pytest.raises(InvalidInputError):
            d.exchange.install(17, life, header, payload)
        assert rows(d, D_BLOCK) == [None] * 4


# ---------------------------------------------------------------- exports


@pytest.mark.parametrize("whole", [True, False])
def test_an_export_is_a_snapshot_of_its_rows_and_of_nothing_else(whole: bool) -> None:
    """Goal: an export shows neither later changes of the block nor its earlier content. Method: another tenant's rows,
    a record of all or of the first two rows, steps and a reset over the block; then the bytes."""
    with new_blocks() as p:
        renewed(p, P_BLOCK)
        write(p, P_BLOCK, [0, 1, 2, 3], "X")
        life = renewed(p, P_BLOCK)
        write(p, P_BLOCK, [0, 1, 2, 3] if whole else [0, 1, 2], "P")
        step = write(p, P_BLOCK, [3], "X", open_step=True) if not whole else None
        key = p.keys.key(None, [1, 2, 3, 4] if whole else [1, 2])
        assert p.exchange.export({key: P_BLOCK}, [life - 1]) == [None], "another life's rows, which do not count"
        (record,) = p.exchange.export({key: P_BLOCK}, [life], [4 if whole else 2])
        before = record.seal()
        assert p.in_flight == (step is not None), "an export keeps nothing"
        assert p.counters.rows_exported == (4 if whole else 2)
        if step is not None:
            step.commit()
        write(p, P_BLOCK, [0], "X")
        assert p.exchange.origins([P_BLOCK]) != [before.origin], (
            "its content has left, what is written next is another's"
        )
        renewed(p, P_BLOCK)
        write(p, P_BLOCK, [0, 1, 2, 3], "X")
        p.reset(weights_version=2)
        assert record.seal() == before
        raw = np.frombuffer(record.payload, np.uint8)[: SPECS[0].block_nbytes].reshape(4, -1)
        assert raw[2:].any() == whole
    with new_blocks() as d:
        assert d.exchange.install(D_BLOCK, renewed(d), before, record.payload) == (4 if whole else 2)
        assert rows(d, D_BLOCK) == (["P"] * 4 if whole else ["P", "P", None, None])


def test_nothing_to_export_is_none() -> None:
    with new_blocks() as p:
        lives = [renewed(p, block) for block in (0, 1)]
        write(p, 1, [0, 1, 2, 3], "P")
        old = p.keys.key(None, [9])
        assert p.exchange.export({old: 0}, lives[:1]) == [None]
        assert p.exchange.export({old: 1}, lives[1:], [0]) == [None]
        assert p.exchange.export({old: 1}, [lives[1] + 1]) == [None]
        assert p.counters.stale_blocks == 1
        p.reset(weights_version=2)
        assert p.exchange.export({old: 1}, lives[1:]) == [None]
        assert p.counters.stale_keys == 1
        for arguments in ((lives[1:], [1, 2]), ([1, 2],)):
            with pytest.raises(InvalidInputError):
                p.exchange.export({old: 1}, *arguments)


@pytest.mark.parametrize("more", [-1, 1])
def test_kv_of_another_size_is_refused(more: int) -> None:
    """Goal: no block has a part of another's KV, or less than its own. Method: a byte too few, and one too many; the
    block's own KV and rows stay."""
    kv = SlotKV(4, 1, 4)
    with AuxBlocks(SPECS, blocks=4, namespace=Namespace("m", 1), kv=kv) as engine:
        life = renewed(engine)
        write(engine, D_BLOCK, [0, 1, 2, 3], "D")
        kv.device[:] = 7
        with pytest.raises(
            RecordError, match=f"KV size: wanted {kv.spec.block_nbytes}, got {kv.spec.block_nbytes + more}"
        ):
            engine.exchange.fill_kv(kv, D_BLOCK, life, 9, bytes(kv.spec.block_nbytes + more))
        assert (kv.device == 7).all()
        assert rows(engine, D_BLOCK) == ["D"] * 4
        assert engine.exchange.fill_kv(kv, D_BLOCK, life, 9, bytes(kv.spec.block_nbytes))
        assert not kv.device[D_BLOCK].any()
        assert rows(engine, D_BLOCK) == [None] * 4
