"""SGLang's radix tree and allocator under the life-cycle kit; run by `make test-sglang`, where SGLang is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sglang_radix_cache
from finding import check_found

from cache_manager.testing.life import BlockManagerMachine, CanaryKV, InvariantBroken, replay


class TestSglang(BlockManagerMachine):
    adapter = sglang_radix_cache.Sglang


def test_a_page_is_published_before_it_is_computed() -> None:
    """Goal: docs/proofs.md is true of this version. Method: its story of a step that was scheduled and never ran."""
    story = [
        ("admit", "s1", [0], 14, "", True, False),
        ("lose", "s1", [0]),
        ("admit", "s2", [0, 0, 0], 14, "", True, False),
    ]
    with pytest.raises(InvariantBroken, match="hit_was_written"):
        replay(sglang_radix_cache.SglangLostStep, story)


class LocksNothing(sglang_radix_cache.Sglang):
    """The prefix that a request has from the tree may be evicted while the request runs."""

    def __init__(self, kv: CanaryKV) -> None:
        super().__init__(kv)
        self.tree.lock = lambda *_, **__: None


class RenewsRowsOnce(sglang_radix_cache.Sglang):
    """The rows of a page are forgotten when its first life begins, and not when it is given out again."""

    def __init__(self, kv: CanaryKV) -> None:
        super().__init__(kv)
        renew, seen = self.rows.aux.renew, set[int]()

        def first(pages: Any) -> Any:
            new = np.array([page for page in pages.tolist() if page not in seen], np.int64)
            seen.update(pages.tolist())
            return renew(new)

        self.rows.aux.renew = first


LOST = "given_once none_free_and_held content_survives no_block_lost no_unexpected_error"


@pytest.mark.parametrize(("fault", "claims"), [(LocksNothing, LOST), (RenewsRowsOnce, "rows_follow_kv reset_forgets")])
def test_a_planted_fault_is_found(fault: Any, claims: str) -> None:
    """Goal: the adapter hides no fault. Method: one in SGLang's tree, of vllm#42571's kind, and one in the rows. Which
    claim finds it depends on the order of the operations."""
    check_found(fault, claims.split())
