"""Classes of hazards within one process; ``crossing.py`` has those between processes."""

from __future__ import annotations

from typing import Final

from tests.fault_matrix.classes import BugClass

HAZARDS: Final = tuple(f"H{n}" for n in range(1, 23))

_AUX = "tests/cache_manager/test_aux_blocks.py::"
_STORED = "tests/cache_manager/test_aux_blocks_stored.py::"
_ROLLOUT = "tests/kvroute/rollout/"
_CLASSES = "tests/fault_matrix/test_classes.py::"
_ENGINE = "tests/engine/test_engine.py::"
_MANAGER = "tests/cache_manager/test_manager.py::"
_LIVES = "cache_manager/testing/life/claims.py::"
_OWN = "tests/cache_manager/test_own_managers.py::"
_MATRIX = "tests/fault_matrix/"
_GROWTH = "tests/cache_manager/test_manager_growth.py::"
_HANDED_OUT = "tests/cache_manager/test_origins_handed_out.py::"
_MOONCAKE = "tests/storage/test_mooncake_faults.py::"
_REGIONS = "tests/regions/"
_PAIRS = "tests/cache_manager/test_pair_mover.py::"
_VOCABULARY = "tests/cache_manager/test_vocabulary.py::"

HAZARD_CLASSES: Final = (
    BugClass(
        ("H1",),
        "a slot is used again and its stale rows look valid",
        "FastDeploy, SGLang, LightLLM, vLLM",
        "generation and validity bits; a restore that fails leaves no readable row",
        (
            _AUX + "test_slot_reuse_never_shows_the_earlier_tenant",
            _MATRIX + "test_storage.py::test_r13_a_junk_file_neither_stops_a_store_nor_reaches_a_block",
        ),
    ),
    BugClass(
        ("H2",),
        "a KV hit without rows",
        "FastDeploy",
        "`gate` cuts the hit back, `mask` reports the rows; rows of another computation than the KV are missing, too",
        (
            _OWN + "test_gate_never_counts_a_block_without_rows_as_a_hit",
            _MANAGER + "test_a_complete_block_takes_the_place_of_one_that_misses_rows",
            _MOONCAKE + "test_rows_go_with_the_kv_of_their_group",
        ),
    ),
    BugClass(
        ("H3",),
        "KV is moved and its rows are not",
        "FastDeploy, SGLang, LightLLM",
        "one mover moves both, or the engine's copy stands in the body of the rows' move: both arrive or neither",
        (
            _AUX + "test_a_move_whose_kv_copy_fails_changes_nothing",
            _LIVES + "check_content",
        ),
    ),
    BugClass(
        ("H4",),
        "a late scatter into a block that was used again",
        "FastDeploy",
        "rows of an older generation are dropped and counted",
        (
            _AUX + "test_a_late_write_into_a_reused_block_is_dropped",
            _STORED + "test_a_reset_while_the_store_is_read_drops_what_was_read",
        ),
    ),
    BugClass(
        ("H5",),
        "export before the rows have landed",
        "FastDeploy",
        "a block with a step in flight is busy; an incomplete one is not stored",
        (
            _AUX + "test_a_block_with_a_step_in_flight_is_not_exported",
            _STORED + "test_an_incomplete_block_is_not_persisted",
            _MANAGER + "test_a_fork_waits_for_a_step_in_flight",
        ),
    ),
    BugClass(
        ("H6",),
        "padding and predicted token counts",
        "FastDeploy",
        "slot -1 is padding, any other slot outside the pool is an error",
        (
            _AUX + "test_rejected_tokens_and_padding_never_become_valid",
            "tests/engine/test_paged_attention.py::test_padding_touches_no_slot",
        ),
    ),
    BugClass(
        ("H7",),
        "a row for the last sampled token",
        "FastDeploy",
        "rows that were not computed are missing, whatever lies in the slot",
        ("tests/end_to_end/test_demo.py::test_everything_happens_and_every_row_is_right",),
    ),
    BugClass(
        ("H9",),
        "the same prefix under other weights",
        "FastDeploy",
        "the weights version is in the namespace of every key; reset",
        (
            _MANAGER + "test_a_reset_reaches_the_store",
            "tests/engine/test_engine_stores.py::test_other_weights_find_nothing_in_the_store",
        ),
    ),
    BugClass(
        ("H11",),
        "attaching to a stale or another's buffer",
        "FastDeploy",
        "random names, a header with its sum, fingerprint and size, checked before the memory is mapped",
        (
            _REGIONS + "test_shared_attach.py::test_a_region_of_another_layout_is_not_mapped",
            _REGIONS + "test_shared_orphans.py::test_a_creator_killed_halfway_leaves_nothing",
        ),
    ),
    BugClass(
        ("H12",),
        "-1 in an unsigned row, 255 or 256, another dtype on the other side",
        "FastDeploy",
        "values that do not fit are refused; validity is a bit, not a sentinel",
        (
            _VOCABULARY + "test_rows_that_do_not_fit_are_named",
            _VOCABULARY + "test_rows_of_any_byte_order_are_the_same_rows",
        ),
    ),
    BugClass(
        ("H13",),
        "which layer is which",
        "GLM, SGLang, LightLLM",
        "the spec names its layers, and they are part of its fingerprint",
        ("tests/kvroute/test_routing_capture.py::test_a_spec_of_other_layers_is_refused",),
    ),
    BugClass(
        ("H15",),
        "buffers smaller than a step, 32-bit offsets",
        "FastDeploy, vLLM",
        "a step takes its rows at any size; offsets are 64-bit",
        (
            _CLASSES + "test_offsets_beyond_two_gigabytes_are_right",
            "tests/kvroute/test_routing_capture.py::test_passes_of_any_size_follow_each_other",
        ),
    ),
    BugClass(
        ("H16",),
        "a rollout store that swallows failures, reorders, or takes a path from a client",
        "FastDeploy",
        "a put that failed or was killed is never read, and is told by its ticket, by counters and by `close`; one "
        "thread stores in order; ids are names",
        (
            _ROLLOUT + "test_manager.py::test_a_failed_put_is_told_to_whoever_asks_and_at_the_end",
            _ROLLOUT + "test_manager.py::test_only_the_last_turn_stays",
            _ROLLOUT + "test_local_faults.py::test_a_writer_killed_anywhere_leaves_the_put_before",
            _ROLLOUT + "test_names.py::test_a_file_name_is_one_name_and_leads_nowhere_else",
        ),
    ),
    BugClass(
        ("H17",),
        "a layer that bypasses the capture",
        "FastDeploy, SGLang",
        "every layer has to have said its ids before a pass counts",
        ("tests/kvroute/test_routing_capture.py::test_a_layer_that_bypasses_its_router_is_found",),
    ),
    BugClass(
        ("H19",),
        "hashes that depend on type and version",
        "FastDeploy",
        "little-endian int64 tokens, whatever integers came in",
        (
            _VOCABULARY + "test_keys_do_not_depend_on_the_integer_type",
            _CLASSES + "test_processes_with_other_hash_seeds_agree_on_every_key",
        ),
    ),
    BugClass(
        ("H8",),
        "rows at the time of sampling against rows of a later computation",
        "FastDeploy",
        "a journal keeps the first ones, by position; those of later are handed out when they are asked for",
        (
            "tests/kvroute/test_journal.py::rows_are_those_that_tokens_were_sampled_with",
            _ENGINE + "test_rows_are_those_that_the_tokens_were_sampled_with",
        ),
    ),
    BugClass(
        ("H20",),
        "samples of one prompt overwrite each other's tails",
        "FastDeploy",
        "a block that others use cannot be written; it is copied first",
        (
            _MANAGER + "test_forks_share_until_one_of_them_writes",
            _GROWTH + "test_a_fork_of_any_number_of_sequences_goes_on_under_its_own_tokens",
            _MANAGER + "test_a_block_that_others_use_cannot_be_written",
        ),
    ),
    BugClass(
        ("H21",),
        "a reader in another process sees half a change",
        "FastDeploy",
        "word, bits, bytes, word again",
        (_REGIONS + "test_view_processes.py::test_a_view_never_takes_torn_or_foreign_rows",),
    ),
    BugClass(
        ("H22",),
        "KV of one computation comes back beside the rows of another: equal tokens, other batches, two stores",
        "kvroute itself, before origins",
        "every block's content, and its records of rows and of KV, name the computation; rows come beside KV of their "
        "own only; a name ends when it is handed out",
        (
            _PAIRS + "test_two_engines_racing_on_one_pool_hand_out_whole_pairs_only",
            _PAIRS + "test_a_kv_store_that_drops_first_does_not_mix_computations",
            "tests/cache_manager/test_origin_machine.py::rows_are_of_the_pass_that_made_the_kv",
            _HANDED_OUT + "test_rows_of_a_second_pass_do_not_come_back_beside_the_kv_of_the_first",
        ),
    ),
)
