"""Classes of published bugs within one process; ``crossing.py`` has those between processes, ``hazards.py`` hazards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

BUGS: Final = tuple(str(n) for n in range(1, 51))

_AUX = "tests/cache_manager/test_aux_blocks.py::"
_AUX_MACHINE = "tests/cache_manager/test_aux_blocks_machine.py::"
_CLASSES = "tests/fault_matrix/test_classes.py::"
_CONTRACT = "cache_manager/testing/contract.py::"
_ENGINE = "tests/engine/test_engine.py::"
_LIFE = "tests/cache_manager/test_lifecycle.py::"
_MANAGER = "tests/cache_manager/test_manager.py::"
_LIVES = "cache_manager/testing/life/claims.py::"
_OWN = "tests/cache_manager/test_own_managers.py::"
_MATRIX = "tests/fault_matrix/"
_REFUSED = "tests/cache_manager/test_refused_steps.py::"
_MOONCAKE = "tests/storage/test_mooncake_faults.py::"
_REGIONS = "tests/regions/"
_VOCABULARY = "tests/cache_manager/test_vocabulary.py::"


@dataclass(frozen=True, slots=True)
class BugClass:
    """``numbers`` of the bugs, where they were seen, and what keeps them away; without ``tests``, why not one."""

    numbers: tuple[str, ...]
    bug: str
    seen: str
    mechanism: str
    tests: tuple[str, ...]


BUG_CLASSES: Final = (
    BugClass(
        ("1",),
        "a copy out races the pass that still writes",
        "vllm#45704",
        "a block that a step in flight writes is neither moved nor stored",
        (_AUX + "test_a_block_with_a_step_in_flight_is_not_exported",),
    ),
    BugClass(
        ("2",),
        "a slot is overwritten while a copy of it is under way",
        "vllm#47282",
        "LEAVING and ARRIVING: the table has no edge out but the end of the copy",
        (
            _CLASSES + "test_a_swap_in_flight_holds_its_blocks_against_every_call",
            _AUX_MACHINE + "a_block_in_motion_cannot_be_freed_or_written",
        ),
    ),
    BugClass(
        ("3", "5"),
        "late writes and stale block tables after a block was given away",
        "vllm#46951, #53505",
        "a write carries the generation it was begun for; a step copies its slots when it begins; slots that are "
        "dropped from one are missing, and fenced until a device that writes them is done",
        (
            _AUX + "test_a_late_write_into_a_reused_block_is_dropped",
            _MATRIX + "test_adversary.py::test_a_slot_buffer_that_is_used_again_changes_no_step_in_flight",
            _REFUSED + "test_a_dropped_slot_that_a_device_writes_is_fenced_until_its_step_has_ended",
            _REFUSED + "test_the_former_rows_of_a_pass_that_is_refused_are_missing",
        ),
    ),
    BugClass(
        ("8",),
        "a lease ends under a slow reader",
        "Mooncake#4239, #850, #4153",
        "the payload's sum decides, never a result code; a lease that ended is read once more",
        (
            "tests/storage/test_mooncake_parts.py::test_a_code_is_one_thing",
            "tests/storage/test_mooncake_damage.py::test_a_damaged_object_is_a_counted_miss_and_can_be_stored_anew",
        ),
    ),
    BugClass(
        ("9", "37"),
        "a view of memory that has gone",
        "sglang PR31296, PR21624",
        "rows read are copies; a region with a living view refuses to close",
        (
            _CLASSES + "test_rows_handed_out_are_the_readers_own",
            _REGIONS + "test_region_contract.py::test_views_that_outlive_the_region_keep_its_memory",
            _AUX + "test_close_waits_for_views_and_can_be_called_again",
        ),
    ),
    BugClass(
        ("11", "12", "13", "14", "16", "17"),
        "double free, negative counts, one owner's release ends another's",
        "LMCache#5005, #1365, #3381, PR5098; vllm#42571; sglang#13483; mini-sglang PR142",
        "leases have owners and end once; a count is derived from them",
        (
            _MATRIX + "test_memory.py::test_r15_a_block_freed_twice_stays_with_its_other_owner",
            _LIFE + "reference_counts_equal_leases",
            _LIVES + "check_accounts",
        ),
    ),
    BugClass(
        ("15",),
        "shared blocks counted twice",
        "sglang#35270",
        "free, cached and held blocks add up to all blocks after every operation",
        (_AUX_MACHINE + "bytes_used_plus_free_equal_capacity", _LIVES + "check_accounts"),
    ),
    BugClass(("18",), "block 0 handed out or freed", "kvcached PR398", "there is no null block: -1 is padding", ()),
    BugClass(
        ("19", "23"),
        "an abort leaves a pin, or fails on what has ended",
        "LMCache#1034; vllm#44100, #25562",
        "looking up pins nothing; `free(owner)` ends all that an owner has, twice as well as once",
        (_ENGINE + "test_abort_at_any_time_leaves_nothing_behind", "tests/support/aux_model.py::free"),
    ),
    BugClass(
        ("25",),
        "a killed process leaves shared memory; a touch without space is a signal",
        "vllm#51579, #54002, #57303",
        "locks tell the living; space is allocated before it is touched",
        (
            _MATRIX + "test_regions.py::test_r18_a_crash_loop_fills_no_shared_memory",
            _REGIONS + "test_shared_room.py::test_a_full_dev_shm_is_an_error_and_never_a_sigbus",
        ),
    ),
    BugClass(
        ("26",),
        "a request that ends beside a transfer of its blocks kills the engine",
        "vllm#46014",
        "the lease ends at once, the block stays until its copy has ended",
        (
            _CLASSES + "test_a_swap_in_flight_holds_its_blocks_against_every_call",
            _MANAGER + "test_blocks_that_are_being_stored_by_another_thread_are_not_lost",
        ),
    ),
    BugClass(
        ("27", "28"),
        "memory fragments, or grows with every token",
        "LMCache#1285; TensorRT-LLM PR18397",
        "slots of one size, allocated at the start; full is an answer",
        (
            _MATRIX + "test_memory.py::test_r09_a_full_store_refuses_and_does_not_grow",
            "tests/storage/test_memory.py::test_the_slot_of_a_deleted_record_is_used_again",
        ),
    ),
    BugClass(
        ("31", "32"),
        "another request's bytes, also after a restart; a failed store stays visible",
        "LMCache#4385, #4492, #4991; DingoCache#231",
        "header, key, layout and sum are checked on every read; the index knows a record when it is whole",
        (
            _CONTRACT + "an_index_entry_points_at_a_verified_record_of_the_same_key",
            _MATRIX + "test_storage.py::test_r04_a_flipped_byte_is_a_counted_miss",
            _MATRIX + "test_storage.py::test_r06_a_full_disk_leaves_nothing_stuck",
        ),
    ),
    BugClass(
        ("33",),
        "old rows after a weight update",
        "vllm#57727; lmdeploy#4917",
        "one reset through all tiers and all that is in flight; the version is in every key",
        (
            _AUX + "test_reset_reaches_every_tier_and_everything_in_flight",
            _LIVES + "check_rows",
        ),
    ),
    BugClass(
        ("35",),
        "a restored KV block finds the rows of the slot's earlier tenant",
        "vllm#56402; LightLLM",
        "a new life starts without a readable row; KV without rows is no hit, or has its rows reported missing",
        (
            _AUX + "test_slot_reuse_never_shows_the_earlier_tenant",
            _MATRIX + "test_storage.py::test_r03_a_file_cut_short_shows_no_stale_byte",
            _OWN + "test_gate_never_counts_a_block_without_rows_as_a_hit",
        ),
    ),
    BugClass(
        ("38", "39"),
        "a key that forgets dtype, model or rank, or whose parts run together",
        "sglang#33268, #24758, PR10969; vllm#44701",
        "every part is tagged and has its length; the layout's fingerprint is one of them",
        (
            _MATRIX + "test_storage_reopened.py::test_r19_rows_are_never_reinterpreted",
            _VOCABULARY + "test_no_two_inputs_share_a_byte_string",
        ),
    ),
    BugClass(
        ("40",),
        "a hash hit is not compared with its tokens",
        "openvino.genai#3722",
        "192 bits of digest; the full key stands in the header and is compared on every read",
        (_VOCABULARY + "test_a_record_is_checked_whole",),
    ),
    BugClass(
        ("41",),
        "processes disagree on hashes",
        "LMCache#1139, #2136, #1379, #1467",
        "little-endian int64 tokens and BLAKE2b; nothing of the interpreter's",
        (
            _CLASSES + "test_processes_with_other_hash_seeds_agree_on_every_key",
            _VOCABULARY + "test_keys_do_not_depend_on_the_integer_type",
        ),
    ),
    BugClass(
        ("44",),
        "a remote store that is down hangs or kills the engine",
        "LMCache#1491, #4759, #4133",
        "a deadline on every call, a breaker, and a store that fails counts as one that has nothing",
        (
            _MOONCAKE + "test_a_master_that_hangs_costs_one_deadline",
            _MOONCAKE + "test_the_master_is_killed_and_restarted_under_load",
            _MANAGER + "test_a_failing_store_never_stops_a_request",
        ),
    ),
    BugClass(
        ("46",),
        "one slow look-up delays every request",
        "vllm#44294",
        "no lock is held while a store is at work",
        (_CLASSES + "test_a_slow_store_holds_up_nobody_else",),
    ),
    BugClass(
        ("47", "48"),
        "files lost or orphaned by a crash or a restart",
        "Mooncake#1139, #3052, #1196; LMCache#562, #2273",
        "the index is rebuilt from the headers; leftovers are swept",
        (
            _MATRIX + "test_storage.py::test_r07_a_restart_finds_and_counts_everything",
            _MATRIX + "test_storage.py::test_r14_what_a_killed_process_left_is_swept",
        ),
    ),
    BugClass(
        ("49",),
        "a file tier without a bound",
        "vllm#52784, #54779; Mooncake#2475",
        "a quota over every byte in the directory, from the start on",
        (_MATRIX + "test_storage_reopened.py::test_r22_the_quota_counts_what_a_killed_process_left",),
    ),
    BugClass(
        ("50",),
        "the native client takes the process with it",
        "InfiniStore#179; aibrix#1228",
        "the native client has a process of its own",
        (_MOONCAKE + "test_the_native_client_may_crash_or_hang",),
    ),
)
