"""Faults of a KV connector that keeps rows with the KV; see :mod:`planted`."""

from __future__ import annotations

from functools import partial

from planted import Fault

IDS = "tests/kvroute/test_step_ids.py::"
PAGES = "tests/kvroute/test_pages.py::"
ENDS = "tests/kvroute/test_connector.py::"
FILLS = "tests/kvroute/test_connector_fills.py::"
CORE = "tests/kvroute/test_vllm_core.py::"
ENDS_LATE = "tests/kvroute/test_connector_ends.py::"
LATE = "tests/kvroute/test_connector_late.py::"
ENDED = "tests/kvroute/test_connector_late.py::"
WORKER = "tests/kvroute/test_connector_late.py::"
VERSIONS = "tests/kvroute/test_connector_versions.py::"
MACHINE = "tests/kvroute/test_connector_machine.py::"
SCHEDULED = "test_every_row_is_that_of_its_tokens_whatever_the_scheduler_does"


def _fault(name: str, file: str, before: str, after: str, where: str, claim: str) -> Fault:
    return Fault(name, file, before, after, where + claim, claim, "kvroute")


_ids = partial(_fault, file="capture/step_ids.py", where=IDS)
_law = partial(_fault, file="capture/hooks.py")

CONNECTOR_FAULTS = [
    _ids(
        "ids of the pass before stay on the device",
        before="            self._buffer.fill_(NOTHING)\n",
        after="            pass\n",
        claim="test_a_layer_that_was_not_recorded_is_detected",
    ),
    _law(
        "layers that share memory are taken",
        before="        if tokens > self._apart:\n",
        after="        if tokens < 0:\n",
        where=IDS,
        claim="test_routers_that_share_memory_are_refused",
    ),
    _law(
        "a router that was called twice is believed",
        before="        if self.calls != self._once:\n",
        after="        if 0 in self.calls:\n",
        where="tests/kvroute/test_layer_capture.py::",
        claim="test_a_pass_that_does_not_fit_stores_nothing",
    ),
    _fault(
        "padding takes the place of a row in a page",
        "connector/pages.py",
        "torch.where(real.any(), rows, self.cache[blocks, 0, offsets])",
        "rows",
        PAGES,
        "test_padding_and_invalid_ids_leave_no_row",
    ),
    _fault(
        "a page is believed beside any KV",
        "connector/pages.py",
        "return folded_on_device(kv.flatten(1).view(torch.int64), self._kv_keys)",
        "return torch.zeros(len(blocks), dtype=torch.int64)",
        PAGES,
        "test_pages_beside_the_kv_of_others_have_no_rows",
    ),
    _fault(
        "a page is believed whatever its sum is",
        "connector/pages.py",
        "good = there & named & (packed[:, 0] == sums)",
        "good = there & named",
        PAGES,
        "test_a_row_of_another_token_position_or_weights_is_missing",
    ),
    _fault(
        "rows go into pages as those of the tokens of the step before",
        "connector/pages.py",
        "        self._held.fill_(_NOTHING)\n",
        "        pass\n",
        PAGES,
        "test_a_token_that_the_model_never_got_has_no_row",
    ),
    _fault(
        "pages are of the weights that an engine began with",
        "connector/scheduler.py",
        'b"" if mixed else self.keys.namespace.fingerprint',
        "self.engine.namespace.fingerprint",
        ENDS,
        "test_pages_say_what_their_rows_are_of",
    ),
    _fault(
        "what the last router chose is taken on trust",
        "connector/left.py",
        "return routes.without(routes.layer_ids[-1:], trusted), []",
        "return routes, []",
        ENDS,
        "test_another_engine_gets_the_rows_of_the_kv_that_it_loads",
    ),
    _fault(
        "a block of which one token is computed again counts as computed",
        "connector/fills.py",
        "min(self._front[block], 0 if i else at % size)",
        "0",
        ENDED,
        "test_a_token_that_is_computed_again_is_whole",
    ),
    _fault(
        "a request is looked at when its block has been full for a step",
        "connector/fills.py",
        "max(1, done + size - at - n)",
        "max(1, done + size - at - n + 1)",
        FILLS,
        "test_no_block_is_found_later_than_it_is_full",
    ),
    _fault(
        "ids of routers that share memory are taken at once",
        "capture/step_ids.py",
        "all(after - place >= nbytes for",
        "all(after - place >= 0 for",
        IDS,
        "test_routers_that_share_memory_are_refused",
    ),
    _fault(
        "an answer does not wait for a late device",
        "connector/ends.py",
        "return through >= max((number for number, _ in end.steps), default=0)",
        "return through >= 0",
        ENDS_LATE,
        "test_no_request_waits_for_a_worker_that_is_behind",
    ),
    _fault(
        "answers that waited go out without what they waited for",
        "integrations/vllm/core.py",
        "            _bring(output, each.value)\n        if told:",
        "            pass\n        if told:",
        CORE,
        "test_answers_of_a_step_go_out_as_the_core_says",
    ),
    _fault(
        "an answer waits for another of its step",
        "integrations/vllm/core.py",
        "            outputs = [left.pop",
        "            if len(told) < len(left):\n                return\n            outputs = [left.pop",
        CORE,
        "test_answers_of_a_step_go_out_as_the_core_says",
    ),
    _fault(
        "a connector inside another one hears nothing of weights",
        "integrations/vllm/core.py",
        "config.instance_id == other.instance_id or config.model_config is other.model_config",
        "config is other",
        CORE,
        "test_calls_of_the_core_about_weights_are_seen",
    ),
    _fault(
        "blocks are given out again before their rows are read",
        "connector/scheduler.py",
        "                self._ends.given(given, self._steps + 1)\n",
        "                pass\n",
        ENDS_LATE,
        "test_no_request_waits_for_a_worker_that_is_behind",
    ),
    _fault(
        "what is computed again takes the place of what a token was sampled with",
        "connector/ends.py",
        "            if kept.stop <= found.start:\n",
        "            if kept.stop >= 0:\n",
        ENDS_LATE,
        "test_a_token_keeps_the_row_that_it_was_sampled_with",
    ),
    _fault(
        "rows of other weights take the place of those that were lost",
        "connector/ends.py",
        "if kept.weights == end.weights and not kept.mixed else []",
        "if not kept.mixed else []",
        ENDS_LATE,
        "test_rows_that_could_not_be_kept",
    ),
    _fault(
        "rows that were left too late stay under the name of another request",
        "connector/ends.py",
        "        if end.void:\n",
        "        if False:\n",
        ENDS_LATE,
        "test_a_store_that_stays_stuck_bounds_what_waits",
    ),
    _fault(
        "a name is used again before its rows are gone",
        "connector/scheduler.py",
        "        return request_id not in self._rooms\n",
        "        return True\n",
        ENDS_LATE,
        "test_a_name_is_used_again_when_its_rows_are_gone",
    ),
    _fault(
        "a step whose drafts were rejected is not waited for",
        "connector/scheduler.py",
        "                at -= n\n",
        "                pass\n",
        ENDED,
        "test_a_step_that_began_before_it_was_thought_to_is_waited_for",
    ),
    _fault(
        "rows whose KV never came are an answer's",
        "connector/scheduler.py",
        "tokens = sys.maxsize if state.load is None else state.load.start",
        "tokens = sys.maxsize",
        ENDED,
        "test_kv_that_never_came_has_no_rows",
    ),
    _fault(
        "slots are read where a draft model has written",
        "connector/worker.py",
        "slots.clone()",
        "slots",
        WORKER,
        "test_slots_are_those_of_the_pass",
    ),
    _fault(
        "what a step without ids wrote over stays",
        "connector/worker.py",
        "            self.blocks.write_step(slots, {})\n            return\n",
        "            return\n",
        WORKER,
        "test_what_a_step_without_ids_has_written_over_is_missing",
    ),
    _fault(
        "rows of a store are there before they are compared",
        "connector/worker.py",
        "            if come:\n                self._compare(come, step.namespace)  # before the step counts as over",
        "            if self._behind:\n                self.blocks.renew([self.engine.clock], [step.number])\n"
        "            if come:\n                self._compare(come, step.namespace)  #",
        ENDED,
        "test_an_aborted_request_waits_for_the_comparison_of_what_it_loads",
    ),
    _fault(
        "blocks that a request has hit are named before they are filled",
        "connector/fills.py",
        "            names = [*(name for name, n in scheduled.items() if n > 1 or name in due), *names]\n",
        "            names = [*names, *(name for name, n in scheduled.items() if n > 1)]\n",
        "tests/kvroute/test_connector_fills.py::",
        "test_no_block_is_found_later_than_it_is_full",
    ),
    _fault(
        "what a step left half done is readable",
        "connector/worker.py",
        "        self._lost = error\n        self.blocks.forget()\n",
        "        self._lost = error\n",
        LATE,
        "test_a_step_whose_host_part_fails_leaves_no_row",
    ),
    _fault(
        "rows that were computed from KV that did not come are kept",
        "connector/worker.py",
        "wrong = again if wrong is None else wrong | again",
        "pass",
        ENDS,
        "test_what_was_computed_from_kv_that_did_not_come_is_computed_again",
    ),
    _fault(
        "rows of other KV are believed",
        "connector/witness.py",
        "            self._rows.forget(wrong)\n",
        "            pass\n",
        ENDS,
        "test_another_engine_gets_the_rows_of_the_kv_that_it_loads",
    ),
    _fault(
        "after a reset the scheduler reads rows of before",
        "connector/scheduler.py",
        "            self.view.follow(namespace.fingerprint)\n",
        "            pass\n",
        ENDS,
        "test_after_new_weights_nothing_is_readable",
    ),
    _fault(
        "rows over KV of other weights are stored",
        "connector/scheduler.py",
        "stores=not self.weights.mixed",
        "stores=True",
        VERSIONS,
        "test_rows_of_mixed_weights_are_not_stored",
    ),
    _fault(
        "a version outlives a pause",
        "connector/versions.py",
        "        if not self._sure:\n            self.changed()\n",
        "        pass\n",
        VERSIONS,
        "test_a_version_stands_until_something_may_have_changed_the_weights",
    ),
    _fault(
        "weights without a name are stored under their version",
        "connector/versions.py",
        "known = self.version if self._named else None",
        "known = self.version",
        VERSIONS,
        "test_a_version_is_shared_by_engines_whose_weights_have_a_name",
    ),
    _fault(
        "a step has the version that comes after it",
        "connector/worker.py",
        "np.full(slots.size, step.version, np.uint32)",
        "np.full(slots.size, step.version + 1, np.uint32)",
        VERSIONS,
        "test_an_answer_of_two_weights_has_two_versions",
    ),
    _fault(
        "what was kept of a request that has no rows stays for ever",
        "connector/ends.py",
        "self.drop((end, *end.kept))",
        "self.drop((end,))",
        ENDS_LATE,
        "test_what_was_kept_of_a_request_is_let_go_at_its_end",
    ),
    _fault(
        "rows that were not written when all was forgotten are taken",
        "connector/ends.py",
        "min((start for number, start in end.steps if number > through), default=end.stop)",
        "end.stop",
        ENDS_LATE,
        "test_a_forgetting_takes_no_row_that_a_late_step_writes_over",
    ),
    _fault(
        "KV that stays over an update counts as one version's",
        "connector/versions.py",
        "        self.mixed = not self._empty\n",
        "        self.mixed = False\n",
        MACHINE,
        SCHEDULED,
    ),
    _fault(
        "rows that a preempted request's tokens were sampled with are not kept",
        "connector/scheduler.py",
        "        state.kept.append(end)\n",
        "        pass\n",
        MACHINE,
        SCHEDULED,
    ),
    _fault(
        "a row of the weights that came before a preemption takes the place of an older one",
        "connector/ends.py",
        "if kept.weights == end.weights and not kept.mixed else []",
        "if kept.weights == end.weights else []",
        ENDS_LATE,
        "test_a_forgetting_loses_only_the_rows_of_the_last_steps",
    ),
]
