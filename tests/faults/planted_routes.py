"""Faults after capture, in routes: rows made again, merged parts, lost layers, and what trainers are given."""

from __future__ import annotations

from planted import Fault

ONE_SEQUENCE = "tests/kvroute/test_routes_merge.py"
MATERIALIZE = "tests/kvroute/test_materialize.py"
CELLS = "tests/kvroute/test_replay_cells.py"
HISTORY = "tests/kvroute/test_journal.py"
JOURNAL = f"{HISTORY}::TestForgetfulEngine"

ROUTES_FAULTS = (
    Fault(
        "a row that is computed again takes the place of the sampled one",
        "journal.py",
        "old = min(max(self.settled - routes.start, 0), len(routes))",
        "old = 0",
        JOURNAL,
        "rows_are_those_that_tokens_were_sampled_with",
        package="kvroute",
    ),
    Fault(
        "rows of a computation that was given up stay",
        "journal.py",
        "self._valid[self.settled :] = False",
        "pass",
        f"{HISTORY}::test_rows_of_a_prompt_that_is_computed_again_before_the_first_token_are_not_kept",
        "test_rows_of_a_prompt_that_is_computed_again_before_the_first_token_are_not_kept",
        package="kvroute",
    ),
    Fault(
        "a row that differs from the one that is there is taken for it",
        "routes/cells.py",
        "    if not same:",
        "    if False:",
        "tests/kvroute/test_routes_merge.py::test_a_row_that_differs_is_named_with_position_and_layer",
        "test_a_row_that_differs_is_named_with_position_and_layer",
        package="kvroute",
    ),
    Fault(
        "another prompt's rows are merged",
        "routes/token_hash.py",
        "if shown < end:",
        "if False:",
        ONE_SEQUENCE,
        "test_another_prompts_rows_are_refused",
        package="kvroute",
    ),
    Fault(
        "a hash of the first tokens binds every row",
        "routes/token_hash.py",
        "hashes[-1][0]) < end:",
        "hashes[-1][0]) < 0:",
        ONE_SEQUENCE,
        "test_a_hash_of_fewer_tokens_than_rows_does_not_bind_them",
        package="kvroute",
    ),
    Fault(
        "a missing layer is a dense one",
        "routes/fill.py",
        " and layer not in missing_layers]",
        "]",
        MATERIALIZE,
        "test_every_row_layer_and_hole_is_where_and_what_was_asked_for",
        package="kvroute",
    ),
    Fault(
        "routes without a layer are complete",
        "routes/cells.py",
        "return not self.layout.missing_layers and bool(",
        "return bool(",
        "tests/kvroute/test_routes.py",
        "test_only_known_cells_have_ids",
        package="kvroute",
    ),
    Fault(
        "a store forgets which layers it was not asked for",
        "routes/layout.py",
        "missing = tuple(sorted(set(self.routed_layers).difference(layer_ids)))",
        "missing = self.missing_layers",
        "tests/kvroute/rollout/test_stores.py::TestLocalRollouts",
        "test_what_was_put_comes_back_whole_and_in_part",
        package="kvroute",
    ),
    Fault(
        "verl replays rows that lack a layer",
        "replay/verl.py",
        " & (not part.missing_layers)",
        "",
        CELLS,
        "test_verl_leaves_rows_that_lack_a_layer_to_the_router",
        package="kvroute",
    ),
    Fault(
        "unlike samples are a batch",
        "routes/layout.py",
        "for name in () if given is self else _MODEL:",
        "for name in ():",
        CELLS,
        "test_unlike_samples_are_no_batch",
        package="kvroute",
    ),
    Fault(
        "parts that are read together are told apart wrongly",
        "routes/parts.py",
        "            at += size * self.cell_nbytes\n",
        "            at += 0\n",
        "tests/kvroute/rollout/test_stores.py::test_ranks_read_little_beside_their_rows",
        "test_ranks_read_little_beside_their_rows",
        package="kvroute",
    ),
)
