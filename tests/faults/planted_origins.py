"""Faults in what belongs to which computation: origins, the law of pairs, installations and exports."""

from __future__ import annotations

from planted import Fault

AUX = "tests/cache_manager/test_aux_blocks_machine.py::TestAuxBlocksHeap"
DEFECTS = "tests/cache_manager/test_defects.py::"
HAZARDS = "tests/cache_manager/test_aux_blocks.py::"
ENGINE = "tests/cache_manager/test_engine_blocks.py::"
HOSTILE = "tests/cache_manager/test_jobs_hostile.py::"
INSTALL = "tests/cache_manager/test_install.py::"
MOVERS = "tests/cache_manager/test_movers_of_others.py::"
PAIRS = "tests/cache_manager/test_pair_machine.py::TestPairs"
ORIGIN = "tests/cache_manager/test_origin_machine.py::TestOrigin"
OUT = "tests/cache_manager/test_origins_handed_out.py::"

SAME_COMPUTATION = "rows_are_of_the_pass_that_made_the_kv"

ORIGIN_FAULTS = [
    Fault(
        "a block whose content has left keeps its origin",
        "table.py",
        "        self.departures[ids] = self.departures.take(ids) + 1\n        self.seal(ids)\n",
        "        self.departures[ids] = self.departures.take(ids) + 1\n",
        DEFECTS + "test_what_is_written_after_a_block_was_stored_is_another_computation_s",
        "test_what_is_written_after_a_block_was_stored_is_another_computation_s",
    ),
    Fault(
        "an origin that was handed out goes on",
        "table.py",
        "        self.end_origin(ids)\n        found: list",
        "        found: list",
        ORIGIN + "Gate",
        "two computations under one origin",
    ),
    Fault(
        "a step in flight commits under an origin that was handed out",
        "step.py",
        "                self._renew_origins()\n",
        "",
        ORIGIN + "Gate",
        "two computations under one origin",
    ),
    Fault(
        "late rows land beside KV that was computed under a name that has ended",
        "landing.py",
        "    if int(table.origin[block]) == came:",
        "    if not table.own[block]:",
        OUT + "test_late_rows_land_beside_no_kv_that_was_computed_here",
        "test_late_rows_land_beside_no_kv_that_was_computed_here",
    ),
    Fault(
        "a move does not carry the origin",
        "move.py",
        "            target.carry_origin(self._targets, origins)\n",
        "",
        HAZARDS + "test_a_swap_takes_the_origin_along",
        "test_a_swap_takes_the_origin_along",
    ),
    Fault(
        "a restored block is written under the origin that it came with",
        "table.py",
        "        self.origin[ids] = origins\n        self.end_origin(ids)\n",
        "        self.origin[ids] = origins\n        self.own[ids] = True\n",
        ORIGIN + "Gate",
        SAME_COMPUTATION,
    ),
    Fault(
        "rows come back beside the KV of another pass",
        "mover.py",
        "            if not self._is_pair(part, beside):\n",
        "            if False:\n",
        MOVERS + "test_rows_of_another_pass_are_not_given_beside_the_kv_that_stayed",
        "test_rows_of_another_pass_are_not_given_beside_the_kv_that_stayed",
    ),
    Fault(
        "masked rows come back beside the KV of another pass",
        "mover.py",
        "isinstance(beside, Found) and beside.origin == part.origin != 0\n",
        "isinstance(beside, Found)\n",
        MOVERS + "test_rows_of_another_pass_are_not_given_beside_the_kv_that_stayed",
        "test_rows_of_another_pass_are_not_given_beside_the_kv_that_stayed",
    ),
    Fault(
        "rows come back beside the KV of another pass after a put that failed half way",
        "mover.py",
        "            if not self._is_pair(part, beside):\n",
        "            if False:\n",
        PAIRS,
        "KV of another computation",
    ),
    Fault(
        "masked rows come back beside the KV of another pass after a put that failed half way",
        "mover.py",
        "isinstance(beside, Found) and beside.origin == part.origin != 0\n",
        "isinstance(beside, Found)\n",
        PAIRS,
        "KV of another computation",
    ),
    Fault(
        "a put says that rows of another pass are stored",
        "mover.py",
        "            return rows if self._is_pair(kv, rows) else None\n",
        "            return rows if kv is not None and rows is not None else None\n",
        ORIGIN + "Gate",
        "nothing_answers_true_for_what_was_not_stored",
    ),
    Fault(
        "a move draws an origin of its own",
        "move.py",
        "            target.carry_origin(self._targets, origins)\n",
        "            target.carry_origin(self._targets, target.draw(self._targets.size))\n",
        ORIGIN + "Gate",
        "a copy has the origin of what it is a copy of",
    ),
    Fault(
        "KV that came keeps the origin of what was there",
        "landing.py",
        "            table.carry_origin(np.array([index]), np.array([origin], np.uint64))\n"
        "            table.installed[index]",
        "            table.installed[index]",
        ORIGIN + "Gate",
        "KV that came has the name it came under",
    ),
    Fault(
        "rows of the block that was there stay beside KV that came",
        "landing.py",
        "                table.forget(np.array([index]))\n",
        "                pass\n",
        ORIGIN + "Gate",
        SAME_COMPUTATION,
    ),
    Fault(
        "a store's fewer answers are taken for all",
        "mover.py",
        '    if len(answers) != len(asked):\n        raise StorageError(f"a mover',
        '    if False:\n        raise StorageError(f"a mover',
        HOSTILE + "test_a_store_that_answers_fewer_keys_than_it_was_asked_for_has_failed",
        "test_a_store_that_answers_fewer_keys_than_it_was_asked_for_has_failed",
    ),
    # ---- installations and exports
    Fault(
        "a record lands in a block of another life",
        "landing.py",
        "    if int(table.generations[block]) != generation:\n",
        "    if False:\n",
        INSTALL + "test_a_record_for_another_life_is_dropped",
        "test_a_record_for_another_life_is_dropped",
    ),
    Fault(
        "a record lands on a row that a device will write",
        "landing.py",
        " & ~_owed(table, index)",
        "",
        INSTALL + "test_a_row_that_a_device_may_still_write_is_not_filled",
        "test_a_row_that_a_device_may_still_write_is_not_filled",
    ),
    Fault(
        "a record lands on the rows that are there",
        "landing.py",
        "bits & came & ~table.region.valid[index]",
        "bits & came",
        INSTALL + "test_a_row_lands_beside_its_own_kv_and_on_no_other_row",
        "test_a_row_lands_beside_its_own_kv_and_on_no_other_row",
    ),
    Fault(
        "a record of another origin lands",
        "landing.py",
        "    if not origin or came != origin:\n",
        "    if not origin:\n",
        INSTALL + "test_rows_of_another_origin_get_no_place_beside_the_kv_that_came",
        "test_rows_of_another_origin_get_no_place_beside_the_kv_that_came",
    ),
    Fault(
        "what was to come still comes after a copy over it",
        "table.py",
        "        self.end_origin(ids)\n        self._drop_installed(ids)\n",
        "        self.end_origin(ids)\n",
        INSTALL + "test_kv_that_is_copied_over_what_was_to_come_gets_none_of_its_rows",
        "test_kv_that_is_copied_over_what_was_to_come_gets_none_of_its_rows",
    ),
    Fault(
        "an export does not keep its blocks",
        "records.py",
        "            self._pinned = ids[whole]\n",
        "            self._pinned = ids[:0]\n",
        INSTALL + "test_a_whole_block_is_read_where_it_lies_and_kept_until_it_is_let_go",
        "test_a_whole_block_is_read_where_it_lies_and_kept_until_it_is_let_go",
    ),
    Fault(
        "a block of another life is stored",
        "records.py",
        "        live = table.generations.take(ids) == given\n",
        "        pass\n",
        ENGINE + "test_a_block_of_another_life_is_not_stored_under_the_key_of_the_first",
        "test_a_block_of_another_life_is_not_stored_under_the_key_of_the_first",
    ),
]
