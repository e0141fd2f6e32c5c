"""Faults in the core: lives, steps, moves, and devices that write in place."""

from __future__ import annotations

from planted import Fault
from planted_jobs import JOB_FAULTS
from planted_origins import ORIGIN_FAULTS

MACHINE = "tests/cache_manager/test_blocks_machine.py::TestBlocksHeap"
BLOCKS = "tests/cache_manager/test_blocks.py::"
KEYS = "tests/cache_manager/test_vocabulary.py::"
MISTAKES = "tests/cache_manager/test_blocks_mistakes.py::"
MOVED = "test_what_changes_in_mid_move_does_not_arrive"
REFUSED = "tests/cache_manager/test_refused_steps.py::"

ROW = "a_row_read_is_the_row_written_or_missing"
FENCE = "a step lands where no device may still write"
LANDS = "a restore lands in what is as it was"

CORE_FAULTS = [
    Fault(
        "a new life does not make the steps of the old one late",
        "table.py",
        "        self._take_away(ids, self.tokens)\n",
        "",
        MACHINE,
        FENCE,
    ),
    Fault(
        "an older step overwrites a newer one",
        "table.py",
        "        self._take_away(claim.slots)\n",
        "",
        MACHINE,
        FENCE,
    ),
    Fault(
        "a restore lands whatever has become of its block",
        "stored.py",
        "(table.changes.take(ids) == self.changes) & table.fillable(ids)",
        "table.fillable(ids)",
        MACHINE,
        LANDS,
    ),
    Fault(
        "a restore lands in a block that a step writes",
        "stored.py",
        "(table.changes.take(ids) == self.changes) & table.fillable(ids)",
        "(table.changes.take(ids) == self.changes)",
        MACHINE,
        LANDS,
    ),
    Fault(
        "a restore lands over rows",
        "stored.py",
        "        live &= table.empty(ids) & ~table.own.take(ids)\n",
        "        live &= ~table.own.take(ids)\n",
        MACHINE,
        LANDS,
    ),
    Fault(
        "a block given to a new owner is not invalidated",
        "publish.py",
        "    bits[ids] = np.zeros(1, bits.dtype)\n",
        "",
        MACHINE,
        "a_restore_comes_late",
    ),
    Fault(
        "a row being rewritten stays readable",
        "publish.py",
        "        if hit.tobytes() != bytes(hit.nbytes):  # some readable",
        "        if False:  #",
        "tests/cache_manager/test_publish.py::test_bits_of_cells_are_those_rows_and_no_others",
        "test_bits_of_cells_are_those_rows_and_no_others",
    ),
    Fault(
        "a reset leaves rows readable",
        "table.py",
        "        republish(self.region, self.generations)\n",
        "        pass\n",
        "tests/cache_manager/test_read_meanwhile.py::test_rows_that_are_gone_when_a_read_ends_are_not_handed_out",
        "test_rows_that_are_gone_when_a_read_ends_are_not_handed_out",
    ),
    Fault(
        "a fork copies more rows than it may",
        "moves.py",
        "                valid &= limits[good]\n",
        "                pass\n",
        "tests/cache_manager/test_install.py::test_kv_that_is_copied_over_what_was_to_come_gets_none_of_its_rows",
        "test_kv_that_is_copied_over_what_was_to_come_gets_none_of_its_rows",
    ),
    Fault(
        "a block in motion may be written",
        "table.py",
        "        return given & ~self.fenced(ids) if self.fences else given\n",
        "        return given\n",
        REFUSED + "test_a_pass_over_a_block_in_motion_leaves_no_row_that_was_moved",
        "test_a_pass_over_a_block_in_motion_leaves_no_row_that_was_moved",
    ),
    Fault(
        "a block into which bytes are copied is given out",
        "blocks.py",
        "                good[good] = ~table.fenced(ids[good])\n",
        "                pass\n",
        BLOCKS + MOVED,
        MOVED,
    ),
    Fault(
        "a move that has failed keeps its blocks",
        "moves.py",
        "        fence.over = True  # at once",
        "        pass  # at once",
        BLOCKS + "test_a_move_that_fails_brings_nothing_and_keeps_nothing",
        "test_a_move_that_fails_brings_nothing_and_keeps_nothing",
    ),
    Fault(
        "a source that was forgotten names what was copied of it",
        "moves.py",
        "            same = source.changes.take(sources) == changes  #",
        "            same = np.ones(sources.size, np.bool_)  #",
        BLOCKS + "test_a_source_without_rows_that_changes_in_mid_move_names_nothing",
        "test_a_source_without_rows_that_changes_in_mid_move_names_nothing",
    ),
    Fault(
        "a source that a pass has begun to write names what was copied of it",
        "moves.py",
        "            same &= source.origin.take(sources) == origins",
        "            same &= True\n",
        BLOCKS + "test_a_source_without_rows_that_changes_in_mid_move_names_nothing",
        "test_a_source_without_rows_that_changes_in_mid_move_names_nothing",
    ),
    Fault(
        "a block that a pass has written meanwhile is filled by a move",
        "table.py",
        "same & (self.changes.take(fence.ids) == fence.changes)",
        "same & True",
        BLOCKS + MOVED,
        MOVED,
    ),
    Fault(
        "a move takes along what a step has committed meanwhile",
        "moves.py",
        "            arrived = target.arrive(fence, same, valid, origins)\n",
        "            arrived = target.arrive(fence, same | True, bits_of(source.region, sources), origins)\n",
        BLOCKS + "test_a_row_that_is_committed_while_its_block_is_copied_does_not_come_along",
        "test_a_row_that_is_committed_while_its_block_is_copied_does_not_come_along",
    ),
    Fault(
        "the rows of a block that was copied over stay",
        "table.py",
        "            self.forget(here)\n",
        "            pass\n",
        MACHINE,
        ROW,
    ),
    Fault(
        "keys forget the parent",
        "keys.py",
        'digest.update(b"".join((_PARENT, parent, self._full',
        'digest.update(b"".join((_PARENT, bytes(32), self._full',
        KEYS + "test_keys_are_equal_exactly_for_equal_prefixes_in_equal_namespaces",
        "test_keys_are_equal_exactly_for_equal_prefixes_in_equal_namespaces",
    ),
    *ORIGIN_FAULTS,
    # ---- devices that write in place
    Fault(
        "a step commits where a device may still write",
        "table.py",
        "(found := self._outside_fences(claim))",
        "(found := claim.mine)",
        BLOCKS + "test_a_step_in_place_waits_for_the_device_of_the_one_before_it",
        "test_a_step_in_place_waits_for_the_device_of_the_one_before_it",
    ),
    Fault(
        "a step keeps what it copies where a device may still write",
        "table.py",
        "            claim.mine = self._outside_fences(claim)\n",
        "            pass\n",
        BLOCKS + "test_a_late_device_write_is_never_taken_for_a_row_of_the_next_step",
        "test_a_late_device_write_is_never_taken_for_a_row_of_the_next_step",
    ),
    Fault(
        "a block that a device still writes is filled",
        "table.py",
        "step.blocks if step.in_place else step.blocks[present]",
        "step.blocks[present]",
        BLOCKS + "test_nothing_is_filled_while_a_device_may_write_it",
        "test_nothing_is_filled_while_a_device_may_write_it",
    ),
    Fault(
        "slots that were dropped are not fenced",
        "table.py",
        "            claim.reach, others = np.append(claim.slots, lost), ",
        "            claim.reach, others = claim.slots, ",
        MACHINE,
        FENCE,
    ),
    Fault(
        "a block of slots that were dropped is filled",
        "table.py",
        "            claim.blocks = np.append(claim.blocks, others)\n",
        "            others = others[:0]\n",
        REFUSED + "test_a_dropped_slot_that_a_device_writes_is_fenced_until_its_step_has_ended",
        "test_a_dropped_slot_that_a_device_writes_is_fenced_until_its_step_has_ended",
    ),
    Fault(
        "what lay at slots that were dropped stays readable",
        "table.py",
        "            self.lose(lost)\n",
        "            pass\n",
        REFUSED + "test_of_a_slot_that_is_given_twice_no_row_is_known",
        "test_of_a_slot_that_is_given_twice_no_row_is_known",
    ),
    Fault(
        "what lay at the slots of a refused pass stays readable",
        "table.py",
        "        slots = slots[(slots >= 0) & (slots < self.end)]\n",
        "        slots = slots[:0]\n",
        REFUSED + "test_the_former_rows_of_a_pass_that_is_refused_are_missing",
        "test_the_former_rows_of_a_pass_that_is_refused_are_missing",
    ),
    Fault(
        "a pass whose slots cannot be read leaves rows readable",
        "table.py",
        "        if slots is None:\n            self.forget_all()\n",
        "        if slots is None:\n",
        REFUSED + "test_where_the_slots_of_a_pass_cannot_be_read_no_row_of_before_is",
        "test_where_the_slots_of_a_pass_cannot_be_read_no_row_of_before_is",
    ),
    Fault(
        "a step commits where a refused pass has written",
        "table.py",
        "        self._take_away(at)\n",
        "",
        REFUSED + "test_a_step_in_flight_does_not_count_where_a_refused_pass_has_written",
        "test_a_step_in_flight_does_not_count_where_a_refused_pass_has_written",
    ),
    Fault(
        "a refused pass goes on under the origin of the one before",
        "table.py",
        "        self.write_under_own_origin(np.unique(blocks[held]), at)\n",
        "",
        REFUSED + "test_a_refused_pass_is_another_computation",
        "test_a_refused_pass_is_another_computation",
    ),
    *JOB_FAULTS,
]
