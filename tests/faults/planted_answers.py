"""Faults of what goes to clients and comes from their answers; see :mod:`planted`."""

from __future__ import annotations

from planted import Fault

CLIENT = "tests/kvroute/test_vllm_answers.py::"
LEFT = "tests/kvroute/test_connector_left.py::"


def _fault(name: str, file: str, before: str, after: str, where: str, claim: str) -> Fault:
    return Fault(name, file, before, after, where + claim, claim, "kvroute")


ANSWER_FAULTS = [
    _fault(
        "rows of other tokens are an answer's",
        "connector/answers.py",
        "if mine[count] != theirs[count]]",
        "if count < 0]",
        CLIENT,
        "test_what_another_request_of_the_id_has_left_is_not_handed_out",
    ),
    _fault(
        "an error in the answer is passed over",
        "connector/answers.py",
        "if (error := asked.told_of(ERROR)) is not None:",
        "if (error := asked.told_of(ERROR)) is not None and rollouts is None:",
        CLIENT,
        "test_an_error_in_the_answer_ends_the_search",
    ),
    _fault(
        "the number of a completion is taken for its prompt's",
        "connector/answers.py",
        "prompt, number = divmod(index, n)",
        "number, prompt = divmod(index, n)",
        CLIENT,
        "test_each_completion_of_a_list_of_prompts_is_found",
    ),
    _fault(
        "an answer that was cut has no hash at its end",
        "connector/left.py",
        "if self.cut else stop\n",
        "if self.cut and stop < 0 else stop\n",
        CLIENT,
        "test_a_cut_answer_has_the_rows_of_its_own_tokens",
    ),
    _fault(
        "an answer's part is not bound to what lies before it",
        "connector/left.py",
        "{start or stop, self.prompt, stop, *range(first, stop)}",
        "{self.prompt, stop, *range(first, stop)}",
        "tests/kvroute/test_connector_ends.py::",
        "test_a_client_gets_the_rows_that_it_lacks",
    ),
    _fault(
        "what an earlier request has left stays under its name",
        "connector/left.py",
        "                self._store.delete(left)\n",
        "                pass\n",
        LEFT,
        "test_rows_of_older_weights_are_not_those_of_the_same_tokens_again",
    ),
    _fault(
        "a part is bound to its rollout and not to its put",
        "rollout/parts.py",
        "    if found != told:",
        "    if found.rollout_id != handle.rollout_id:",
        "tests/kvroute/rollout/test_local_faults.py::",
        "test_a_file_of_another_rollout_is_damage",
    ),
    _fault(
        "a part is taken unsummed",
        "routes/wire.py",
        "        if told != found:",
        "        if len(told) != len(found):",
        "tests/kvroute/rollout/test_local_faults.py::",
        "test_every_byte_of_a_file_counts",
    ),
    _fault(
        "a writer of a rollout does not wait for another",
        "rollout/local.py",
        "                _lock(fd)\n",
        "",
        "tests/kvroute/rollout/test_local_faults.py::",
        "test_a_writer_that_never_ends_costs_the_put_and_no_engine",
    ),
    _fault(
        "a put whose name is not on the disk stays",
        "rollout/local.py",
        "                self._delete(handle)\n                raise\n",
        "                raise\n",
        "tests/kvroute/rollout/test_local_faults.py::",
        "test_a_put_that_cannot_be_synced_is_a_failure",
    ),
    _fault(
        "the pointers of a name begin at the same number again",
        "rollout/mooncake.py",
        "secrets.randbelow(NUMBERS)",
        "0",
        "tests/kvroute/rollout/test_mooncake_rollouts.py::",
        "test_a_late_removal_of_pointers_spares_the_next_life_of_a_name",
    ),
    _fault(
        "a closed manager raises into the engine",
        "rollout/manager.py",
        '                refused = StoreClosedError(f"',
        '                raise StoreClosedError(f"',
        "tests/kvroute/rollout/test_manager.py::",
        "test_a_closed_manager_refuses_and_raises_nothing_into_an_engine",
    ),
]
