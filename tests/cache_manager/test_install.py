"""Rows that cross: what is exported, and where and when it may land."""

from __future__ import annotations

import numpy as np
import pytest
from canary import canary_rows
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.aux_blocks import AuxBlocks
from cache_manager.errors import BlockBusyError, InvalidInputError, RecordError
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


def rows(aux: AuxBlocks, block: int) -> list[str | None]:
    """Who wrote each row of the block, by the canary; ``None`` where it is missing in every spec."""
    found: list[str | None] = []
    for o in range(4):
        seen = set()
        for spec in SPECS:
            read = aux.read(spec.name, [block], o, o + 1)
            if read.valid[0]:
                (who,) = [w for w in "PDX" if (canary_rows(spec, [(w, o)]) == read.ids).all()]
                seen.add(who)
            else:
                seen.add(None)
        (who,) = seen
        found.append(who)
    return found


def exported(offsets: list[int], count: int | None = None) -> tuple[RecordHeader, bytes]:
    """The record of a block in which P wrote ``offsets``; what it exports may not change under anybody."""
    with aux_blocks() as p:
        p.allocate([P_BLOCK], "req")
        write(p, P_BLOCK, offsets, "P")
        key = p.keys.key(None, [1, 2, 3, 4])
        (record,) = p.export({key: P_BLOCK}, None if count is None else [count])
        header, payload = record.seal(), bytes(record.payload)
        check_record(header, key, p.layout.fingerprint, payload)
        del record
        return header, payload


@given(
    st.sets(st.integers(0, 3), min_size=1),
    st.sets(st.integers(0, 3)),
    st.sets(st.integers(0, 3)),
    st.sampled_from(("commit", "abort")),
)
def test_a_row_lands_where_none_is_and_none_will_be(sent: set, written: set, stepping: set, end: str) -> None:
    """Goal: the rows of the KV that is really used win. Method: some rows are there, others are in a step in flight."""
    header, payload = exported(sorted(sent))
    with aux_blocks() as d:
        d.allocate([D_BLOCK], "req")
        (generation,) = d.generations([D_BLOCK])
        if written:
            write(d, D_BLOCK, sorted(written), "D")
        step = write(d, D_BLOCK, sorted(stepping), "D", open_step=True) if stepping else None
        assert d.install(D_BLOCK, generation, header, payload)
        now = {**dict.fromkeys(sent, "P"), **dict.fromkeys(written, "D"), **dict.fromkeys(stepping, None)}
        assert rows(d, D_BLOCK) == [now.get(o) for o in range(4)]
        if step is not None:
            getattr(step, end)()
        now |= dict.fromkeys(stepping, "D" if end == "commit" else None)
        assert rows(d, D_BLOCK) == [now.get(o) for o in range(4)]
        assert d.counters.rows_installed == len(sent - written - stepping)
        d.assert_consistent()


def test_a_record_for_another_life_is_dropped() -> None:
    header, payload = exported([0, 1, 2, 3])
    with aux_blocks() as d:
        d.allocate([D_BLOCK], "req")
        (generation,) = d.generations([D_BLOCK])
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
        before = d.generations([D_BLOCK])[0]
        d.reset(weights_version=2)
        assert not d.install(D_BLOCK, before, header, payload)
        assert not d.install(D_BLOCK, d.generations([D_BLOCK])[0], header, payload)
        assert rows(d, D_BLOCK) == [None] * 4


def test_a_block_in_motion_is_busy() -> None:
    header, payload = exported([0, 1, 2, 3])
    with aux_blocks() as d:
        d.allocate([D_BLOCK], "req")
        (generation,) = d.generations([D_BLOCK])
        with d.begin_copy([(D_BLOCK, 3)]), pytest.raises(BlockBusyError):
            d.install(D_BLOCK, generation, header, payload)
        assert d.install(D_BLOCK, generation, header, payload)


def test_a_record_of_another_layout_is_an_error_and_changes_nothing() -> None:
    header, payload = exported([0, 1, 2, 3])
    with aux_blocks() as d:
        d.allocate([D_BLOCK], "req")
        (generation,) = d.generations([D_BLOCK])
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
        (record,) = p.export({key: P_BLOCK}, [2])
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
            assert d.install(D_BLOCK, d.generations([D_BLOCK])[0], header, record.payload)
            assert rows(d, D_BLOCK) == ["P", "P", None, None]


def test_a_whole_block_is_read_where_it_lies() -> None:
    with aux_blocks() as p:
        p.allocate([P_BLOCK], "req")
        write(p, P_BLOCK, [0, 1, 2, 3], "P")
        (record,) = p.export({p.keys.key(None, [1, 2, 3, 4]): P_BLOCK})
        assert np.shares_memory(np.frombuffer(record.payload, np.uint8), p.region("device").rows)
        assert p.counters.rows_exported == 4
        del record


def test_nothing_to_export_is_none() -> None:
    with aux_blocks() as p:
        p.allocate([0, 1], "req")
        write(p, 1, [0, 1, 2, 3], "P")
        old = p.keys.key(None, [9])
        assert p.export({old: 0}) == [None]
        assert p.export({old: 1}, [0]) == [None]
        p.reset(weights_version=2)
        assert p.export({old: 1}) == [None]
        assert p.counters.stale_keys == 1
        with pytest.raises(InvalidInputError):
            p.export({old: 1}, [1, 2])
