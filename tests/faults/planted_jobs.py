"""Faults in jobs, in the feed of an engine's blocks, and where threads, signals and processes meet in them."""

from __future__ import annotations

from planted import Fault

BLOCKS = "tests/cache_manager/test_blocks.py::"
INTERRUPTED = "test_a_call_that_is_interrupted_leaves_nothing_wrong_and_nothing_taken"
JOBS = "tests/cache_manager/test_jobs.py::"
KV = "tests/cache_manager/test_kv.py::"
MACHINE = "tests/cache_manager/test_blocks_machine.py::TestBlocksHeap"
MEANWHILE = "tests/cache_manager/test_read_meanwhile.py::"
SALTED = "tests/simulation/test_salted_passes.py::test_each_row_is_of_the_pass_that_made_the_kv_beside_it"
THREADS = "tests/cache_manager/test_blocks_threads.py::"

JOB_FAULTS = [
    Fault(
        "KV does not come back with its rows",
        "stored.py",
        "                kv.fill(ids[arrived], self.staged_kv(kv)[arrived])\n",
        "                pass\n",
        SALTED,
        "KV of another prefix or of other weights",
    ),
    Fault(
        "a record without rows that are required here stays",
        "stored.py",
        "each.valid != valid[i]]",
        "each.valid == valid[i]]",
        JOBS + "test_what_a_reader_needs_decides_whether_a_record_will_do",
        "test_what_a_reader_needs_decides_whether_a_record_will_do",
    ),
    Fault(
        "a job of a block of another life is done",
        "stored.py",
        "    return ids, lives, live & ours\n",
        "    return ids, lives, ours\n",
        MACHINE,
        "nothing_answers_true_for_what_was_not_stored",
    ),
    Fault(
        "rows are staged in another order",
        "stored.py",
        "= table.region.rows[self.ids]\n",
        "= table.region.rows[self.ids[::-1]]\n",
        "tests/cache_manager/test_own_managers.py::TestStored",
        "rows_follow_kv",
    ),
    Fault(
        "a job is stored as the block is when the store gets to it",
        "stored.py",
        "views, valid = [row.data for row in self.staging],",
        "views, valid = [self.of._device.region.rows[block].data for block in self.ids],",
        JOBS + "test_nothing_is_pinned_while_a_store_hangs",
        "test_nothing_is_pinned_while_a_store_hangs",
    ),
    Fault(
        "bytes of jobs in flight have no bound",
        "stored.py",
        "(not n or nbytes <= self._limits.nbytes_max)",
        "True",
        JOBS + "test_bytes_in_flight_are_bounded_but_one_job_always_fits",
        "test_bytes_in_flight_are_bounded_but_one_job_always_fits",
    ),
    Fault(
        "a cancelled restore lands",
        "stored.py",
        "        live &= not self.cancelled\n",
        "",
        JOBS + "test_a_cancelled_job_brings_nothing",
        "test_a_cancelled_job_brings_nothing",
    ),
    Fault(
        "a block is filled from two records",
        "stored.py",
        "        return live & self.of._device.known(ids)[1]",
        "        return live",
        JOBS + "test_a_block_is_filled_from_one_record",
        "test_a_block_is_filled_from_one_record",
    ),
    Fault(
        "a store's fewer answers are taken for all",
        "storage/batch.py",
        "    if len(answers) != len(asked):\n",
        "    if False:\n",
        JOBS + "test_a_store_that_answers_fewer_keys_than_it_was_asked_for_has_failed",
        "test_a_store_that_answers_fewer_keys_than_it_was_asked_for_has_failed",
    ),
    Fault(
        "KV stays where its rows do not",
        "moves.py",
        "            kv.copy(source.tier, target.tier, *pairs_of_kv)\n",
        "            pass\n",
        KV + "test_kv_goes_along_where_rows_cannot",
        "test_kv_goes_along_where_rows_cannot",
    ),
    # ---- the feed
    Fault(
        "a gap of the feed is passed over",
        "feed.py",
        "if restarted or number > wanted:",
        "if restarted:",
        MACHINE,
        "an_old_generation_never_becomes_valid",
    ),
    Fault(
        "what an interrupted batch of the feed had still to say is not missed",
        "feed.py",
        '                self._lock.torn += 1\n                self._tables["device"].forget_all(lives=True)\n',
        "                pass\n",
        THREADS + "test_a_batch_that_is_interrupted_leaves_nothing_from_before_it",
        "test_a_batch_that_is_interrupted_leaves_nothing_from_before_it",
    ),
    Fault(
        "blocks are in their old lives when a batch of the feed was lost",
        "feed.py",
        'lives=restarted or tier == "device"',
        "lives=restarted",
        MACHINE,
        "an_old_generation_never_becomes_valid",
    ),
    Fault(
        "a reset that is interrupted leaves regions of the old weights",
        "blocks.py",
        "            table.region.renew(self.namespace.fingerprint)\n",
        "",
        THREADS + "test_after_a_reset_that_is_interrupted_regions_and_keys_are_of_one_namespace",
        "test_after_a_reset_that_is_interrupted_regions_and_keys_are_of_one_namespace",
    ),
    Fault(
        "a batch of the feed is done twice",
        "feed.py",
        "        return number >= wanted\n",
        "        return True\n",
        MACHINE,
        "a_batch_comes_twice",
    ),
    Fault(
        "a scheduler that was started anew is taken for repetitions",
        "feed.py",
        "if restarted := before != epoch:",
        "if restarted := False:",
        MACHINE,
        "a_scheduler_starts_anew",
    ),
    Fault(
        "a close does not wait for a call of another thread",
        "stored.py",
        "                    job.phase, self._begun[job] = Phase.CARRYING, None\n",
        "                    job.phase = Phase.CARRYING\n",
        JOBS + "test_close_waits_for_a_call_of_another_thread",
        "test_close_waits_for_a_call_of_another_thread",
    ),
    # ---- threads, signals, processes
    Fault(
        "a signal handler goes on inside another call",
        "lock.py",
        "        if self._is_owned():  # type: ignore[attr-defined]\n            raise BlockBusyError",
        "        if False:\n            raise BlockBusyError",
        THREADS + "test_a_call_inside_another_is_refused_and_one_of_another_thread_waits",
        "test_a_call_inside_another_is_refused_and_one_of_another_thread_waits",
    ),
    Fault(
        "a loss that cannot be recorded is not made up for",
        "lock.py",
        "            self._lock.torn += 1  # in the middle",
        "            pass  # in the middle",
        "tests/cache_manager/test_blocks_mistakes.py",
        "test_a_pass_that_is_refused_inside_another_call_leaves_no_row_of_before",
    ),
    Fault(
        "what was interrupted half way counts",
        "lock.py",
        "            if self.torn:\n",
        "            if False:\n",
        THREADS + INTERRUPTED,
        INTERRUPTED,
    ),
    Fault(
        "two moves fill one block",
        "table.py",
        "            found |= self.among(ids, fence.ids)\n",
        "            pass\n",
        BLOCKS + "test_a_second_move_into_a_block_is_dropped",
        "test_a_second_move_into_a_block_is_dropped",
    ),
    Fault(
        "a forked child waits for its parent's jobs",
        "lock.py",
        "        if os.getpid() != self._pid:\n",
        "        if False:\n",
        JOBS + "test_close_in_a_forked_child_does_not_wait_for_the_parents_jobs",
        "test_close_in_a_forked_child_does_not_wait_for_the_parents_jobs",
    ),
    Fault(
        "a reset does not reach the regions",
        "blocks.py",
        "                table.region.renew(keys.namespace.fingerprint)\n",
        "                pass\n",
        THREADS + "test_a_reset_reaches_readers_in_other_processes",
        "test_a_reset_reaches_readers_in_other_processes",
    ),
    Fault(
        "a read for a generation does not look again after the copy",
        "blocks.py",
        " | (table.region.words.take(ids) != words)] = 0\n",
        "] = 0\n",
        MEANWHILE + "test_rows_that_are_gone_when_a_read_ends_are_not_handed_out",
        "test_rows_that_are_gone_when_a_read_ends_are_not_handed_out",
    ),
    Fault(
        "a negative number fits a dtype without sign",
        "spec.py",
        "<= min(info.max, np.iinfo(values.dtype).max)",
        "<= info.max",
        "tests/cache_manager/test_vocabulary.py",
        "test_rows_that_do_not_fit_are_named",
    ),
]
