"""Faults of the rows of SGLang's slots; see :mod:`planted`."""

from __future__ import annotations

from planted import Fault

ROWS = "tests/kvroute/test_sglang_rows.py::"
LAW = "test_a_row_is_of_the_pass_that_made_the_kv_or_missing"
KEPT = "test_rows_go_by_kv_that_others_keep"
HOST = "test_what_goes_to_the_host_while_its_pass_runs_has_its_rows_when_that_is_over"
FILLED = "test_a_page_that_is_filled_while_a_pass_still_writes_for_a_dead_request_keeps_what_came"
LOST = "test_what_happens_behind_a_pass_that_never_ends_happens_before_the_next"
ASKED = "test_a_request_whose_pass_never_ended_has_no_rows_of_before"
ENDED, GO_ON = "        self.ended = each.number\n", "        self.go_on()\n"
ANSWER = "test_an_answer_has_both_fields"


def _fault(name: str, before: str, after: str, claim: str) -> Fault:
    return Fault(name, "integrations/sglang/rows.py", before, after, ROWS + claim, claim, "kvroute")


SGLANG_FAULTS = [
    _fault(
        "a pass writes pages filled after it",
        "(pages > 0) & (self._filled[pages] < each",
        "(pages > 0) & (self._filled[pages] <= each",
        FILLED,
    ),
    _fault("the rest of a page begins its life anew", " & (slots % self.page == 0)", "", LAW),
    _fault("a page is copied before its pass is over", "if after <= self.ended:", "if True:", HOST),
    _fault("what follows a lost pass is done after the next", f"    {ENDED}    {GO_ON}", ENDED + GO_ON, LOST),
    _fault("a pass that never ended hands out older rows", "self._renew(pages[self._unsure(pages)])", "pass", ASKED),
    _fault("a page on the host keeps its old rows", "            self._renew(targets)\n", "", HOST),
    _fault("rows land beside KV of another computation", "        self._named(pages, origins)\n", "", KEPT),
    _fault("a page whose rows did not come is a hit again", "key not in self._gone", "True", KEPT),
    _fault("what is missing is expert 0", ".astype(np.int32), -1)", ".astype(np.int32), 0)", ANSWER),
]
