"""Faults of the rows of SGLang's slots; see :mod:`planted`."""

from __future__ import annotations

from planted import Fault

ROWS = "tests/kvroute/test_sglang_rows.py::"
LAW = "test_a_row_is_of_the_pass_that_made_the_kv_or_missing"
KEPT = "test_rows_go_by_kv_that_others_keep"
HOST = "test_what_follows_to_the_host_goes_where_pages_are_still_what_they_were"


def _fault(name: str, before: str, after: str, claim: str) -> Fault:
    return Fault(name, "integrations/sglang/rows.py", before, after, ROWS + claim, claim, "kvroute")


SGLANG_FAULTS = [
    _fault(
        "a pass writes pages given out after it", "[slots // self.page] < number", "[slots // self.page] <= number", LAW
    ),
    _fault("the rest of a page begins its life anew", "at[at % self.page == 0]", "at", LAW),
    _fault(
        "rows of a page that was given out again go to the host", "== lives).all(axis=1)]", "== lives)[:, 1]]", HOST
    ),
    _fault("rows go to a page of the host that has another's", "== lives).all(axis=1)]", "== lives)[:, 0]]", HOST),
    _fault("rows land beside KV of another computation", "        self._name(pages[now])\n", "", KEPT),
    _fault("a page whose rows did not come is a hit again", "key not in self._gone", "True", KEPT),
    _fault(
        "what is missing is expert 0",
        ".astype(np.int32), -1)",
        ".astype(np.int32), 0)",
        "test_an_answer_has_both_fields",
    ),
]
