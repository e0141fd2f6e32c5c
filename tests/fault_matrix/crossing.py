"""Classes of bugs and hazards between processes, and those that wait for what kvroute does not have yet."""

from __future__ import annotations

from typing import Final

from tests.fault_matrix.classes import BugClass

_CROSSING = "tests/fault_matrix/test_crossing.py::"
_HANDOVER = "tests/serving/test_handover.py::"
_INSTALL = "tests/cache_manager/test_install.py::"
_MOONCAKE = "tests/transfer/test_mooncake_link.py::"
_NODES = "tests/transfer/test_nodes.py::"
_PROCESSES = "tests/serving/test_processes.py::"
_SERVERS = "tests/serving/test_servers.py::"
_SESSIONS = "tests/transfer/test_sessions.py::"
_ENDS = "tests/transfer/test_sessions_ends.py::"
_SIMULATION = "tests/simulation/test_transfer_simulation.py::test_every_claim_holds_under_every_fault"
_MANAGER_PROCESS = "tests/transfer_manager/test_process.py::"

CROSSING_BUGS: Final = (
    BugClass(
        ("4",),
        "blocks that decode has not received yet are stored, and reloaded as garbage",
        "vllm#34526, PR35092",
        "rows are readable one by one, when they are verified and in place; a landing block has no key, and an "
        "incomplete one is not stored",
        (
            _HANDOVER + "test_blocks_that_are_landing_are_found_by_nobody",
            _HANDOVER + "test_what_does_not_come_is_computed_or_reported",
            "tests/cache_manager/test_aux_blocks_stored.py::test_an_incomplete_block_is_not_persisted",
        ),
    ),
    BugClass(
        ("6",),
        "decode gives pages away while prefill still writes them",
        "sglang#24527, PR35049",
        "prefill writes into no block of decode's: records are placed by decode, into the generation they were asked "
        "for; landing blocks have a lease of their own until the pull has ended",
        (
            _HANDOVER + "test_an_abort_while_blocks_are_landing_gives_everything_back",
            _INSTALL + "test_a_record_for_another_life_is_dropped",
            _CROSSING + "test_records_that_come_after_the_end_are_placed_nowhere",
            _MOONCAKE + "test_what_landed_is_a_copy",
        ),
    ),
    BugClass(
        ("7",),
        "the end of a lease takes the producer's memory away under the reader",
        "vllm-omni PR6264",
        "whatever ends a transfer, its blocks are released when the link has let go of every buffer of it",
        (
            _ENDS + "test_every_end_waits_for_the_link",
            _ENDS + "test_release_waits_for_the_link",
            _SIMULATION,
        ),
    ),
    BugClass(
        ("10",),
        "a handle of generation N is used after the peer has registered N+1",
        "nixl PR2027, PR2051",
        "a process is a *run*: nothing of an older run is obeyed; a command carries the generations it was made for, "
        "and memory lent to an engine a life of its own",
        (
            _ENDS + "test_a_restarted_decode_owns_nothing_of_its_old_run",
            _ENDS + "test_a_restarted_prefill_is_greeted_again_and_has_nothing",
            _MANAGER_PROCESS + "test_a_block_of_another_generation_is_refused_and_not_written",
            _MOONCAKE + "test_forged_words_change_nothing",
            _PROCESSES + "test_the_same_identity_again",
        ),
    ),
    BugClass(
        ("20",),
        "decode's blocks of an aborted receive are never reclaimed",
        "vllm#46283, PR46289; vllm-ascend#16662",
        "the end of a pull is told once, however it ends, and frees the lease of its landing blocks",
        (
            _HANDOVER + "test_an_abort_while_blocks_are_landing_gives_everything_back",
            _NODES + "test_an_abort_of_either_side_ends_both",
            _SIMULATION,
        ),
    ),
    BugClass(
        ("21",),
        "prefill's blocks are stranded when decode refuses the request",
        "vllm PR41269",
        "the front tells prefill that nobody will come; if it cannot, a lease ends",
        (
            _SERVERS + "test_prefill_is_told_when_no_decode_will_come",
            _NODES + "test_an_unpulled_offer_ends_with_its_lease",
        ),
    ),
    BugClass(
        ("22",),
        "a client chooses the id of a transfer, and overwrites another's",
        "vllm PR49796",
        "prefill makes the ids, 16 random bytes each; one that is known is refused on both sides",
        (
            _CROSSING + "test_nobody_chooses_the_id_of_a_transfer",
            _HANDOVER + "test_one_transfer_is_taken_over_once",
            _ENDS + "test_wrong_calls_change_nothing",
        ),
    ),
    BugClass(
        ("24",),
        "an abort or a failed start of a transfer leaks blocks",
        "sglang PR9874, #9927, PR15439, PR37103, #28902",
        "a refusal holds nothing, and every begun transfer ends in a release: a table without another way out",
        (
            _NODES + "test_what_cannot_begin_is_told_and_releases",
            _ENDS + "test_every_life_can_end_and_an_end_is_final",
            _PROCESSES + "test_decode_is_killed_during_a_transfer",
            _SIMULATION,
        ),
    ),
    BugClass(
        ("29",),
        "a failed receive answers with wrong tokens: unknown, consumed, out of range, ended; a reference used after "
        "its block was given on is answered with the other prompt",
        "vllm#52234",
        "a transfer that has ended is gone, whatever lies in its blocks now; a block is asked for by its key, and its "
        "record is verified against that key; what did not come is computed or reported",
        (
            _CROSSING + "test_a_reference_used_again_gives_no_row_of_the_next_tenant",
            _CROSSING + "test_a_reference_that_names_nothing_is_missing",
            _HANDOVER + "test_an_unknown_transfer_is_computed_here",
        ),
    ),
    BugClass(
        ("30",),
        "a transfer that failed is marked complete; another generation's bytes; a changed layout corrupts silently",
        "dynamo#15079, #5068, #14416",
        "decode counts what it has verified and placed itself, and nothing that prefill says makes it more",
        (
            _SESSIONS + "test_a_damaged_record_is_asked_for_again",
            _SESSIONS + "test_whatever_is_lost_all_of_it_arrives_once_or_is_missing",
            _INSTALL + "test_a_record_of_another_layout_is_an_error_and_changes_nothing",
            _HANDOVER + "test_what_does_not_come_is_computed_or_reported",
        ),
    ),
    BugClass(
        ("34",),
        "prefill is aborted and decode goes on, on garbage",
        "sglang#30233",
        "decode runs when every KV record has been placed, and computes from the first gap on",
        (
            _HANDOVER + "test_a_prefill_that_gives_up_in_the_middle_is_not_believed",
            _HANDOVER + "test_prefill_gone_before_the_pull",
            _HANDOVER + "test_rows_that_never_come_are_missing_with_a_reason",
            _PROCESSES + "test_prefill_is_killed_during_a_transfer",
        ),
    ),
    BugClass(
        ("36",),
        "rows of the prompt are lost between prefill and decode; other versions and layouts are not noticed",
        "vllm#55584; llm-d-router#1473",
        "rows cross as the KV does, block by block; the first message compares namespace (with the weights version) "
        "and every part, and a refusal names the field, what was wanted and what came",
        (
            _HANDOVER + "test_nothing_is_computed_twice_and_every_row_is_there",
            _CROSSING + "test_a_layout_that_differs_in_anything_is_refused_by_field",
            _ENDS + "test_peers_that_do_not_mean_the_same_refuse",
            _NODES + "test_peers_that_mean_other_rows_are_refused",
        ),
    ),
    BugClass(
        ("42",),
        "one lost notice of completion or failure, and somebody waits for ever",
        "TensorRT-LLM#17665; sglang#36033, PR36108",
        "what was not answered is said again, a bounded number of times; then the pull fails with a reason, and the "
        "lease ends",
        (
            _CROSSING + "test_whatever_is_never_heard_both_sides_end",
            _ENDS + "test_an_ack_is_repeated_until_it_is_heard_and_changes_nothing_twice",
            _SIMULATION,
        ),
    ),
    BugClass(
        ("43",),
        "writes that failed are waited for; heartbeats do not renew leases",
        "vllm PR50754, #53095",
        "any message of the owner renews the lease, up to a bound; a pull without progress is retried, then fails; a "
        "write that fails goes another way",
        (
            _ENDS + "test_a_lease_is_renewed_by_messages_and_ends_at_its_bound",
            _ENDS + "test_decode_renews_while_it_waits",
            _CROSSING + "test_whatever_is_never_heard_both_sides_end",
            _MOONCAKE + "test_a_write_that_fails_goes_by_zeromq_and_its_range_rests",
        ),
    ),
)

CROSSING_HAZARDS: Final = (
    BugClass(
        ("H10",),
        "rows between prefill and decode: lost, late, twice, reordered; decode's own prefix; an abort on either side",
        "FastDeploy",
        "a pull is idempotent by block and epoch, and its records are verified; rows may come until the request ends, "
        "then they are missing with a reason; the rows of the KV in use win",
        (
            _SIMULATION,
            _HANDOVER + "test_what_decode_has_itself_is_not_asked_for",
            _HANDOVER + "test_rows_may_come_after_decoding_has_begun",
            _HANDOVER + "test_blocks_on_offer_are_not_given_away",
            _INSTALL + "test_a_row_lands_beside_its_own_kv_and_on_no_other_row",
        ),
    ),
    BugClass(
        ("H18",),
        "every turn of a conversation reads all rows before it",
        "FastDeploy",
        "a read takes a range and copies the blocks of that range only; routes are cut and joined by position",
        (
            "tests/fault_matrix/test_classes.py::test_reading_the_rows_of_a_turn_costs_that_turn",
            "tests/kvroute/test_routes.py::test_cutting_and_joining_gives_the_whole_back",
        ),
    ),
)

PENDING_BUGS: Final = (
    BugClass(
        ("45",),
        "a decision of one rank, for which the others wait",
        "TensorRT-LLM PR14020; sglang PR29978, PR29984",
        "kvroute has no engine of several ranks, so nothing is decided for them together yet. (Of the two bugs beside "
        "it, a lost control message ends as any lost notice does, above, and each socket has one thread.)",
        (),
    ),
)
PENDING_HAZARDS: Final = (
    BugClass(
        ("H14",),
        "tokens split over tensor, expert or data parallel ranks",
        "FastDeploy",
        "rank and world are in every key, so that shards never meet; rows of several ranks are not gathered yet",
        (),
    ),
)
"""Without a mechanism, and so without a test."""
