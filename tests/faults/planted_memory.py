"""Faults in the order that makes a read without a lock right, each caught whatever the threads do; in regions, in what
a device writes into them, and in what a store gives back."""

from __future__ import annotations

from planted import Fault

EACH = "tests/cache_manager/test_publish.py"
ORDERS = "tests/cache_manager/test_publish.py"
LAUNCHED = "tests/engine/test_engine_launched.py::"
ALL_ORDERS = "test_every_order_of_loads_and_stores"

MEMORY_FAULTS = [
    Fault(
        "a rewrite does not change the word",
        "publish.py",
        "(word & ~SEQUENCE_MASK) | ((word + _ONE) & SEQUENCE_MASK)",
        "word",
        f"{ORDERS}::{ALL_ORDERS}",
        ALL_ORDERS,
    ),
    Fault(
        "the word changes before the bits are cleared",
        "publish.py",
        "    bits[ids] = np.zeros(1, bits.dtype)\n    region.words[ids] = words\n",
        "    region.words[ids] = words\n    bits[ids] = np.zeros(1, bits.dtype)\n",
        f"{ORDERS}::{ALL_ORDERS}",
        ALL_ORDERS,
    ),
    Fault(
        "bits are taken after the bytes",
        "publish.py",
        "    words, bits = region.words[ids], valid[ids]\n    rows = source[ids]\n",
        "    words, rows = region.words[ids], source[ids]\n    bits = valid[ids]\n",
        f"{ORDERS}::{ALL_ORDERS}",
        ALL_ORDERS,
    ),
    Fault(
        "a read that gives up hands out what it has",
        "publish.py",
        "    bits[torn] = 0\n",
        "",
        f"{EACH}::test_a_block_that_never_holds_still_has_no_valid_row_and_ends",
        "test_a_block_that_never_holds_still_has_no_valid_row_and_ends",
    ),
    Fault(
        "a view does not ask for whom a row was written",
        "regions/view.py",
        "        bits[words >> np.uint64(GENERATION_SHIFT) != wanted[held].astype(np.uint64)] = 0\n",
        "",
        "tests/regions/test_view.py::test_rows_of_the_generations_asked_for_and_no_others",
        "test_rows_of_the_generations_asked_for_and_no_others",
    ),
    Fault(
        "a view reads on after a weight update",
        "regions/view.py",
        "            bits[:] = 0\n",
        "            pass\n",
        "tests/regions/test_view.py::test_after_a_weight_update_nothing_older_is_readable",
        "test_after_a_weight_update_nothing_older_is_readable",
    ),
    Fault(
        "a region has its name before it is whole",
        "regions/shared.py",
        "            memory = _allocate(name, fd, extent.nbytes)\n",
        "            directory.give_name(fd, name)\n            os.unlink(directory.region_path(name))\n"
        "            memory = _allocate(name, fd, extent.nbytes)\n",
        "tests/regions/test_shared_orphans.py::test_a_creator_killed_halfway_leaves_nothing",
        "test_a_creator_killed_halfway_leaves_nothing",
    ),
    # ---- capture and stores
    Fault(
        "slots of an earlier, longer pass stay behind a shorter one",
        "capture/launched.py",
        "        self._slots_words[len(slots) : self._used] = -1\n",
        "",
        LAUNCHED + "test_tokens_beyond_the_slots_are_padding",
        "test_tokens_beyond_the_slots_are_padding",
        "kvroute",
    ),
    Fault(
        "bits of rows that a block has not are taken",
        "storage/records.py",
        '                or (no_row and int.from_bytes(header.valid, "little") & no_row)\n',
        "",
        "tests/storage/test_quarantine.py::test_a_record_that_says_more_rows_than_a_block_has_is_set_aside",
        "test_a_record_that_says_more_rows_than_a_block_has_is_set_aside",
    ),
]
