"""The judge of ``kvroute demo-pd``, which ``.ci/run`` runs as a person does; its servers: tests/serving."""

from __future__ import annotations

import io
from dataclasses import replace

from cache_manager.keys import Namespace
from kvroute.routes import Routes
from paged_engine.demo import Driver
from paged_engine.engine import Engine
from paged_engine.options import Options
from paged_engine.workload import conversations


def test_the_judge_sees_a_tampered_and_a_missing_row() -> None:
    """Goal: the judge can fail. Method: a true answer; one row of it changed and one removed; one token changed; and
    the answer cut short."""
    options = Options(requests=1)
    run = Driver(options, io.StringIO())
    with Engine(run.build(), options.engine, Namespace("m", weights_version=0)) as engine:
        engine.add(replace(conversations(1, 0)[0].ask(), n=1))
        (honest,) = engine.run()
    ids, valid = honest.routes.ids.copy(), honest.routes.valid.copy()
    ids[3, 0] = (ids[3, 0] + 1) % 16
    valid[5] = False
    routes = Routes(ids, valid, honest.routes.layer_ids, honest.routes.num_experts, honest.routes.num_layers)
    other = (*honest.tokens[:-1], honest.tokens[-1] ^ 1)
    short = Routes(honest.routes.ids[:-1], valid[:-1] | True, routes.layer_ids, routes.num_experts, routes.num_layers)
    for change, wrong in (
        ({}, (0, 0, 0)),
        ({"routes": routes}, (0, 1, 1)),
        ({"tokens": other}, (1, 0, 0)),
        ({"tokens": honest.tokens[:-1], "routes": short}, (1, 0, 0)),
    ):
        found = run.judge({("", 0): replace(honest, **change)})
        assert (found.answers_wrong, found.rows_wrong, found.rows_missing) == wrong, change
