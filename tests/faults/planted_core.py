"""Faults in the core: lives, steps, moves, leases, origins, jobs, exports, and the feed of an engine's blocks."""

from __future__ import annotations

from planted import Fault
from planted_origins import ORIGIN_FAULTS

AUX = "tests/cache_manager/test_aux_blocks_machine.py::TestAuxBlocksHeap"
LIVES = "tests/cache_manager/test_lifecycle.py::"
LIFE = LIVES + "TestLifecycle"
HAZARDS = "tests/cache_manager/test_aux_blocks.py::"
STORED = "tests/cache_manager/test_aux_blocks_stored.py::"
DEFECTS = "tests/cache_manager/test_defects.py::"
ENGINE = "tests/cache_manager/test_engine_blocks.py::"
FEED = "tests/cache_manager/test_feed.py::"
JOBS = "tests/cache_manager/test_jobs.py::"
INSIDE = "test_a_finaliser_beside_jobs_waits_for_no_thread_that_waits_for_its_own"
KEYS = "tests/cache_manager/test_vocabulary.py::"
PROCESS = "tests/transfer_manager/test_process.py::"

ROW = "a_row_read_is_the_row_written_or_missing"

CORE_FAULTS = [
    Fault(
        "a new life does not make the steps of the old one late",
        "table.py",
        "        if self.steps:  # the number of a step that has ended is nobody's\n",
        "        if False:\n",
        AUX,
        ROW,
    ),
    Fault(
        "an older step overwrites a newer one",
        "step.py",
        "            table.writer[kept] = number\n",
        "            table.writer[kept[~np.isin(table.writer[kept], list(table.steps))]] = number\n",
        HAZARDS + "test_a_slot_that_a_newer_step_has_taken_is_not_given_back",
        "test_a_slot_that_a_newer_step_has_taken_is_not_given_back",
    ),
    Fault(
        "a restore lands without comparing generations",
        "store_jobs.py",
        "        live: NDArray[np.bool_] = table.generations.take(ids) == self._generations\n",
        "        live: NDArray[np.bool_] = np.ones(ids.size, np.bool_)\n",
        STORED + "test_a_reset_while_the_store_is_read_drops_what_was_read",
        "test_a_reset_while_the_store_is_read_drops_what_was_read",
    ),
    Fault(
        "a block given to a new owner is not invalidated",
        "memory.py",
        "    bits[ids] = np.zeros(1, bits.dtype)\n",
        "",
        AUX,
        ROW,
    ),
    Fault(
        "a row being rewritten stays readable",
        "memory.py",
        "        if hit.tobytes() != bytes(hit.nbytes):  # some readable",
        "        if False:  #",
        AUX,
        ROW,
    ),
    Fault(
        "a reset forgets the generations",
        "table.py",
        "        else:\n            self.begin_life(everything)\n",
        "        else:\n            self.forget(everything)\n",
        LIFE,
        "a_generation_is_a_count_of_lives",
    ),
    Fault(
        "a released owner keeps one lease",
        "leases.py",
        "            left = np.array(mine)\n",
        "            left = np.array(mine)[: len(mine) - (len(mine) > 1)]\n",
        AUX,
        "bytes_used_plus_free_equal_capacity",
    ),
    Fault(
        "a move leaves a lease behind",
        "leases.py",
        "            self.release(owner, sources if everything else sources[going], held=True)\n",
        "",
        AUX,
        "bytes_used_plus_free_equal_capacity",
    ),
    Fault(
        "a lease given up during a move comes back at the target",
        "leases.py",
        "            going = mask & self.among(sources, self.blocks(owner))\n",
        "            going = mask\n",
        LIVES + "test_a_lease_that_ended_while_the_move_was_open_is_passed_on_to_nobody",
        "test_a_lease_that_ended_while_the_move_was_open_is_passed_on_to_nobody",
    ),
    Fault(
        "a job's lease follows a move",
        "leases.py",
        "in self._blocks.items() if name not in self._staying]",
        "in self._blocks.items()]",
        JOBS + "test_a_job_keeps_its_blocks_whoever_lets_go",
        "test_a_job_keeps_its_blocks_whoever_lets_go",
    ),
    Fault(
        "a failed move counts as arrived",
        "move.py",
        "self._target.end_arrival(self._targets, arrived=arrived)",
        "self._target.end_arrival(self._targets, arrived=True)",
        AUX,
        "bytes_used_plus_free_equal_capacity",
    ),
    Fault(
        "a block in motion may be written",
        "lifecycle.py",
        "        Event.SHARE: State.LEAVING,\n",
        "        Event.SHARE: State.LEAVING,\n        Event.WRITE: State.LEAVING,\n",
        AUX,
        "a_block_in_motion_cannot_be_freed_or_written",
    ),
    Fault(
        "a block in motion may be freed",
        "lifecycle.py",
        "        Event.LAST_RELEASE: State.LEAVING,\n",
        "        Event.LAST_RELEASE: State.CACHED,\n",
        LIFE,
        "states_are_what_happened",
    ),
    Fault(
        "the first of two copies lets the block go",
        "table.py",
        "self._end(some(ids, left == 0), Event.DEPARTED_HELD",
        "self._end(ids, Event.DEPARTED_HELD",
        LIFE,
        "states_are_what_happened",
    ),
    Fault(
        "a fork copies more rows than it may",
        "move.py",
        "                valid &= self._rows\n",
        "                pass\n",
        HAZARDS + "test_a_copy_can_be_limited_to_the_first_rows",
        "test_a_copy_can_be_limited_to_the_first_rows",
    ),
    Fault(
        "a block that a step writes is copied",
        "move.py",
        "            if not beside_steps:\n                source.check_no_step(",
        "            if False:\n                source.check_no_step(",
        HAZARDS + "test_a_block_with_a_step_in_flight_is_not_exported",
        "test_a_block_with_a_step_in_flight_is_not_exported",
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
        "a block that a device still writes is given out",
        "table.py",
        "        self.check_no_device(ids)\n",
        "",
        LIFE,
        "DID NOT RAISE",
    ),
    Fault(
        "a step commits where a device may still write",
        "step.py",
        "self._outside_fences(table.writer.take(entry.slots) == entry.number)",
        "table.writer.take(entry.slots) == entry.number",
        ENGINE + "test_a_step_in_place_waits_for_the_device_of_the_one_before_it",
        "test_a_step_in_place_waits_for_the_device_of_the_one_before_it",
    ),
    Fault(
        "a step keeps what it copies where a device may still write",
        "step.py",
        "                self._yield_to_devices()\n",
        "                pass\n",
        ENGINE + "test_a_late_device_write_is_never_taken_for_a_row_of_the_next_step",
        "test_a_late_device_write_is_never_taken_for_a_row_of_the_next_step",
    ),
    Fault(
        "a block that a device still writes is filled",
        "table.py",
        "            if step.in_place:\n                found |= self.leases.among(ids, step.blocks)\n",
        "            if step.in_place:\n                pass\n",
        ENGINE + "test_nothing_is_filled_while_a_device_may_write_it",
        "test_nothing_is_filled_while_a_device_may_write_it",
    ),
    # ---- an engine's blocks and its feed
    Fault(
        "a move takes along what a step has committed meanwhile",
        "move.py",
        "            if beside_steps:  # a row",
        "            if False:  # a row",
        ENGINE + "test_a_row_that_is_committed_while_its_block_is_copied_does_not_come_along",
        "test_a_row_that_is_committed_while_its_block_is_copied_does_not_come_along",
    ),
    Fault(
        "a restore lands after a reset",
        "store_jobs.py",
        "            live &= table.lapses.take(ids) == self._lapses",
        "            live &= True",
        ENGINE + "test_rows_that_come_late_land_in_nothing_that_has_changed",
        "test_rows_that_come_late_land_in_nothing_that_has_changed",
    ),
    Fault(
        "a gap of the feed is passed over",
        "engine_blocks.py",
        "        if missing:\n            self.forget()\n",
        "        if missing:\n",
        FEED + "test_a_gap_forgets_all_rows_and_goes_on",
        "test_a_gap_forgets_all_rows_and_goes_on",
    ),
    Fault(
        "a batch of the feed is done twice",
        "engine_blocks.py",
        "        if batch.number < self._next_batch:\n",
        "        if False:\n",
        FEED + "test_a_repetition_does_nothing_and_is_counted",
        "test_a_repetition_does_nothing_and_is_counted",
    ),
    Fault(
        "the cache-transfer process moves one part of a block",
        "mover.py",
        "        self._kv.copy(source, target, sources, targets)\n",
        "",
        PROCESS + "test_a_move_copies_every_part_and_nothing_else",
        "test_a_move_copies_every_part_and_nothing_else",
    ),
    # ---- what the tests of others had let live
    Fault(
        "a signal handler goes on inside another call",
        "books.py",
        "            if inside := self._busy:\n",
        "            if False:\n",
        DEFECTS + "test_a_signal_handler_may_look_and_give_up_and_nothing_else",
        "test_a_signal_handler_may_look_and_give_up_and_nothing_else",
    ),
    Fault(
        "a finaliser frees inside another call",
        "books.py",
        "            if self._busy:\n                self._later.append(call)\n                return\n",
        "            if self._busy:\n                call()\n                return\n",
        DEFECTS + "test_a_request_that_is_collected_inside_a_call_frees_its_blocks_after_it",
        "test_a_request_that_is_collected_inside_a_call_frees_its_blocks_after_it",
    ),
    Fault(
        "a finaliser waits for a thread that waits for its own",
        "books.py",
        "        if self._inside():\n",
        "        if False:\n",
        "tests/cache_manager/test_jobs_hostile.py::" + INSIDE,
        INSIDE,
    ),
    Fault(
        "a step that is dropped stays in flight",
        "books.py",
        "        if not self._ended:\n            with suppress(BlockStateError):",
        "        if False:\n            with suppress(BlockStateError):",
        DEFECTS + "test_a_step_that_is_dropped_is_aborted_and_counted",
        "test_a_step_that_is_dropped_is_aborted_and_counted",
    ),
    Fault(
        "rejected rows count as late",
        "step.py",
        "entry.slots.size) - live)",
        "entry.slots.size) - landed)",
        DEFECTS + "test_rejected_rows_are_not_late_ones",
        "test_rejected_rows_are_not_late_ones",
    ),
    Fault(
        "a reset does not reach the regions",
        "block_set.py",
        "                table.region.renew(keys.namespace.fingerprint)\n",
        "                pass\n",
        DEFECTS + "test_a_reset_reaches_readers_in_other_processes",
        "test_a_reset_reaches_readers_in_other_processes",
    ),
    Fault(
        "a read does not look who holds the block after the copy",
        "block_set.py",
        "            mine &= table.region.words.take(ids) == words",
        "            mine &= True",
        "tests/cache_manager/test_read_meanwhile.py::test_a_block_that_passes_to_another_owner_during_a_read",
        "test_a_block_that_passes_to_another_owner_during_a_read",
    ),
    Fault(
        "a negative number fits a dtype without sign",
        "spec.py",
        "<= min(info.max, np.iinfo(values.dtype).max)",
        "<= info.max",
        DEFECTS + "test_a_value_that_does_not_fit_is_an_error_and_never_another_value",
        "test_a_value_that_does_not_fit_is_an_error_and_never_another_value",
    ),
    Fault(
        "keys forget what else decides the content",
        "keys.py",
        ' + _part(b"extra", extra))',
        ")",
        "tests/cache_manager/test_manager_salts.py::test_images_separate_what_they_and_all_after_them_make",
        "test_images_separate_what_they_and_all_after_them_make",
    ),
]
