"""The judge of ``kvroute demo-pd``, which ``.ci/run`` runs as a person does; its servers: tests/serving."""

from __future__ import annotations

import io
from dataclasses import replace

from cache_manager.keys import Namespace
from kvroute.routes import Routes
from paged_engine.bodies import DRAW
from paged_engine.demo import Driver
from paged_engine.engine import Engine
from paged_engine.options import Options
from paged_engine.workload import conversations


def test_the_judge_sees_a_tampered_and_a_missing_row() -> None:
    """Goal: the judge can fail. Method: true answers with one row changed, one row removed, or one token changed."""
    options = Options(requests=1)
    run = Driver(options, io.StringIO())
    request = replace(conversations(1, 0)[0].ask(), draw=DRAW)
    with Engine(run.build(), options.plain_engine, Namespace("m", weights_version=0)) as engine:
        engine.add(request)
        outputs = {(output.request.id, output.sample): output for output in engine.run()}
    key, honest = next(iter(outputs.items()))
    ids, valid = honest.routes.ids.copy(), honest.routes.valid.copy()
    ids[3, 0] = (ids[3, 0] + 1) % 16
    valid[5] = False
    routes = Routes(ids, valid, honest.routes.layer_ids, honest.routes.num_experts, honest.routes.num_layers)
    assert run.plainly(outputs, watched=True, draw=DRAW)
    other = replace(honest, tokens=(*honest.tokens[:-1], honest.tokens[-1] ^ 1))
    assert not run.plainly(outputs | {key: other}, draw=DRAW)
    found = [run.judge(each, {}) for each in (outputs, outputs | {key: replace(honest, routes=routes)})]
    assert [(verdict.rows_wrong, verdict.rows_missing) for verdict in found] == [(0, 0), (1, 1)]
