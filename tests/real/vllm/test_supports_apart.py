"""What decode's sampler drew from, behind a prompt that another engine has computed: two engines, interpreted.

By hand, with ``KVROUTE_SUPPORTS_APART=1``: CI has no time for two engines in Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import interpreter
import models
import pytest
from engines import judge_tokens
from ports import hold_port
from waiting import GIVE_UP_S, until

from bench.drawn_from import judged
from bench.harness import ROOT
from kvroute import Routes, SamplingSupport

HERE = Path(__file__).parent


@pytest.mark.skipif("KVROUTE_SUPPORTS_APART" not in os.environ, reason="by hand")
@pytest.mark.timeout(1800)
def test_decode_has_supports_of_its_draws_and_prefills_rows(model: Callable[..., Path], tmp_path: Path) -> None:
    """Goal: with prefill and decode apart, each token of the answer has the support that decode drew it from, the
    prompt has none, and one record has them beside the rows of prefill's pass. Method: two engines over NIXL;
    transformers' logits judge each support, and its routers each row."""
    pytest.importorskip("nixl")
    home = model("qwen3_moe")
    backend = interpreter.written(tmp_path / "backend")
    for place in (ROOT / ".venv").glob("lib/python3*/site-packages/triton*"):  # the project's own environment has it
        (backend / place.name).symlink_to(place)
    search = os.pathsep.join(map(str, (HERE, ROOT / "tests" / "worlds", backend, os.environ["PYTHONPATH"])))
    with ExitStack() as running:
        engines = []
        for role in ("prefill", "decode"):
            log = running.enter_context((tmp_path / f"{role}.log").open("w"))
            variables = {
                **os.environ,
                **interpreter.ENVIRONMENT,
                "PYTHONPATH": search,
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(hold_port()),
            }
            command = [sys.executable, "-m", "drawing_apart", role, str(home), str(tmp_path)]
            engine = subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT)
            running.callback(engine.wait)
            running.callback(engine.kill)
            engines.append(engine)
        try:
            prefill, decode = engines
            until(lambda: decode.poll() is not None or prefill.poll())
            assert decode.poll() == 0
            assert prefill.wait(GIVE_UP_S) == 0
        except BaseException:
            for role in ("prefill", "decode"):
                print(role, (tmp_path / f"{role}.log").read_text()[-4000:])
            raise
    told = json.loads((tmp_path / "answers.json").read_text())
    due = right = wrong = rows = 0
    for answer in told["answers"]:
        prompt = len(answer["prompt"])
        assert answer["start"] == prompt
        assert len(answer["counts"]) == len(answer["tokens"])
        found, missed, error = judged(models.reference(home), answer)
        right, wrong = right + found, wrong + missed
        due += len(answer["tokens"])
        assert error < 1e-3
        record = bytes.fromhex(answer["record"])
        tokens = [*answer["prompt"], *answer["tokens"]]
        support, routes = SamplingSupport.of_record(record), Routes.from_bytes(record)
        assert support is not None
        support.validate(tokens, loss_mask=[0] * prompt + [1] * len(answer["tokens"]))
        verdict = judge_tokens(home, tokens, routes)
        assert (verdict.missing, verdict.wrong) == (0, 0)
        rows += verdict.right
    print(f"\n{right} of {due} supports right, {wrong} wrong; {rows} rows right, {told['installed']} of prefill's")
    assert wrong == 0
    assert right > 0.9 * due
    assert told["installed"] >= sum(len(answer["prompt"]) // 32 * 32 for answer in told["answers"])
