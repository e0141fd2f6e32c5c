"""Faults in how rows and KV are assigned to computations: origins, restores beside KV, installations and exports."""

from __future__ import annotations

from planted import Fault

BLOCKS = "tests/cache_manager/test_blocks.py::"
INSTALL = "tests/cache_manager/test_install.py::"
JOBS = "tests/cache_manager/test_jobs.py::"
LATE = "test_late_rows_land_beside_no_kv_that_was_computed_here"
MACHINE = "tests/cache_manager/test_blocks_machine.py::TestBlocksHeap"
OTHER = "test_what_was_to_come_for_other_kv_does_not_come"
SNAPSHOT = "test_an_export_is_a_snapshot_of_its_rows_and_of_nothing_else"

ROW = "a_row_read_is_the_row_written_or_missing"
LANDS = "a restore lands in what is as it was"
ONE_CONTENT = "two computations under one origin"

ORIGIN_FAULTS = [
    Fault(
        "a block whose content is stored keeps its origin",
        "stored.py",
        "        table.seal(self.ids)\n",
        "",
        MACHINE,
        ONE_CONTENT,
    ),
    Fault(
        "a block whose content has crossed keeps its origin",
        "landing.py",
        "            table.seal(ids[live])\n",
        "",
        INSTALL + SNAPSHOT,
        SNAPSHOT,
    ),
    Fault(
        "an origin that was handed out goes on",
        "table.py",
        "        self._end_origin(ids)\n        return [int(",
        "        return [int(",
        MACHINE,
        ONE_CONTENT,
    ),
    Fault(
        "late rows land beside KV that was computed under a name that has ended",
        "table.py",
        "        if int(self.origin[block]) == came:",
        "        if not self.own[block]:",
        INSTALL + LATE,
        LATE,
    ),
    Fault(
        "a move does not carry the origin",
        "table.py",
        "        self.carry_origin(fence.ids[arrived], origins[arrived])\n",
        "",
        MACHINE,
        "rows of no origin",
    ),
    Fault(
        "a restored block is written under the origin that it came with",
        "table.py",
        "        self.origin[ids] = origins\n        self._end_origin(ids)\n",
        "        self.origin[ids] = origins\n        self.own[ids] = True\n",
        MACHINE,
        ONE_CONTENT,
    ),
    Fault(
        "rows come back beside KV that has come under another origin",
        "stored.py",
        " & ((known == 0) | (known == origins))\n",
        "\n",
        BLOCKS + "test_rows_do_not_come_back_beside_kv_of_another_computation",
        "test_rows_do_not_come_back_beside_kv_of_another_computation",
    ),
    Fault(
        "a record that misses what is required is a hit",
        "stored.py",
        "        arrived &= (bits[:, self.of._required, :] == table.full).all(axis=(1, 2))\n",
        "",
        JOBS + "test_what_a_reader_needs_decides_whether_a_record_will_do",
        "test_what_a_reader_needs_decides_whether_a_record_will_do",
    ),
    Fault(
        "a put says that rows of another pass are its own",
        "stored.py",
        "        self.answers.update((key, header.origin) for key,",
        "        self.answers.update((key, self.origins[0].item()) for key,",
        JOBS + "test_an_answer_names_the_origin_that_is_stored",
        "test_an_answer_names_the_origin_that_is_stored",
    ),
    Fault(
        "rows of the block that was there stay beside KV that came",
        "table.py",
        "        if named not in (0, origin) or self.own[block]:\n            self.forget(one)\n",
        "",
        INSTALL + "test_kv_that_comes_over_what_was_computed_here_takes_its_rows_away",
        "test_kv_that_comes_over_what_was_computed_here_takes_its_rows_away",
    ),
    # ---- installations and exports
    Fault(
        "a record lands in a block of another life",
        "landing.py",
        "not generation or int(table.generations[block]) != generation:",
        "not generation:",
        INSTALL + "test_what_comes_for_another_life_is_dropped",
        "test_what_comes_for_another_life_is_dropped",
    ),
    Fault(
        "a record lands among bytes that are being copied",
        "landing.py",
        "    if table.fenced(np.array([block]))[0]:\n",
        "    if False:\n",
        INSTALL + "test_a_block_into_which_bytes_are_copied_is_busy",
        "test_a_block_into_which_bytes_are_copied_is_busy",
    ),
    Fault(
        "a record lands on a row that a device will write",
        "table.py",
        "        landed &= ~owed\n",
        "        pass\n",
        INSTALL + "test_a_row_that_a_device_may_still_write_is_not_filled",
        "test_a_row_that_a_device_may_still_write_is_not_filled",
    ),
    Fault(
        "a record lands on the rows that are there",
        "table.py",
        "[0] & ~self.region.valid[block]\n",
        "[0]\n",
        INSTALL + "test_a_row_lands_beside_its_own_kv_and_on_no_other_row",
        "test_a_row_lands_beside_its_own_kv_and_on_no_other_row",
    ),
    Fault(
        "a record of another origin lands",
        "table.py",
        "        if not origin or came != origin:\n",
        "        if not origin:\n",
        INSTALL + "test_rows_of_another_origin_get_no_place_beside_the_kv_that_came",
        "test_rows_of_another_origin_get_no_place_beside_the_kv_that_came",
    ),
    Fault(
        "what was to come still comes in the next life",
        "table.py",
        "        self.changes[ids] += 1\n        self._drop_installed(ids)\n",
        "        self.changes[ids] += 1\n",
        INSTALL + OTHER,
        OTHER,
    ),
    Fault(
        "an export is what the block is when it is read",
        "landing.py",
        "record.rows.tobytes()\n",
        "table.region.rows[block].data\n",
        INSTALL + SNAPSHOT,
        SNAPSHOT,
    ),
]
