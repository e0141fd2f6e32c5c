"""References of routes as NeMo-RL's workers may ask for them: ranges that are none, and versions that are over."""

from __future__ import annotations

import numpy as np
import pytest
import ray

from cache_manager.errors import InvalidInputError
from kvroute.replay.nemo_rl_references import References
from kvroute.testing.rollouts import routes_of

TOKENS = 9


@pytest.mark.usefixtures("cluster")
def test_only_ranges_of_the_rows_and_versions_to_come() -> None:
    """Goal: a range says which rows, or is refused, and rows for weights that were retired do not come back. Method:
    every offset and length about the rows of one sample; then the versions about the retired one."""
    routes = routes_of(1, TOKENS - 1)
    rows = routes.materialize(TOKENS, "moe", "int16", missing="minus1")
    references = References()
    ref = references.put(routes, TOKENS, request_id="r", task=1, rollout=2, weights_version=5)
    source = references.source
    for offset in (-1, 0, 4, TOKENS):
        for length in (-1, 0, 1, TOKENS - offset, TOKENS - offset + 1):
            asked = source.get_ranges.remote([ref | {"offset": offset, "length": length}])
            if offset >= 0 and length >= 0 and offset + length <= TOKENS:
                assert np.array_equal(ray.get(asked)["values"], rows[offset : offset + length])
            else:
                with pytest.raises(ValueError, match=f"a range of its {TOKENS} rows"):
                    ray.get(asked)
    ray.get(source.retire_through.remote(5))
    for version, is_over in ((4, True), (5, True), (6, False)):
        names = {"request_id": "r", "task": 1, "rollout": 2, "weights_version": version}
        if is_over:
            with pytest.raises(InvalidInputError, match="a new one for weights after version 5"):
                references.put(routes, TOKENS, **names)
        else:
            assert np.array_equal(
                ray.get(source.get_ranges.remote([references.put(routes, TOKENS, **names)]))["values"], rows
            )
