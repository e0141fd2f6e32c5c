"""``kvroute verify`` against a server that answers as vLLM or SGLang does, with faults planted in its rows."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pybase64
import pytest
import torch
from experts_seen import experts_of
from row_server import EXPERTS, Engine, none, serving
from salted_moe import small_moe
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import kvroute
from bench.vllm_families import make
from cache_manager.errors import InvalidInputError, RowError
from kvroute.capture.capture import find_routers
from kvroute.cli import FAILED, USAGE, main
from kvroute.verify.asking import ServerError, decoded, rows_of
from kvroute.verify.weights import NOISE, Weights


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("checkpoint")
    small_moe(0).save_pretrained(home)
    return home


def verify(url: str, model: Path, *more: str) -> int:
    least = ["--requests", "16", "--longest", "48", "--new", "4", "--dtype", "float32"]
    return main(["verify", "--url", url, "--model", str(model), *least, *more])


def late(change: Any) -> Any:
    """The fault, in the twelfth answer and later: answers to prompts that were sent before."""
    return lambda rows, number, earlier: change(rows.copy(), earlier) if number >= 12 else rows


def shifted(rows: np.ndarray, _: Any) -> np.ndarray:
    rows[1:8] = rows[:7].copy()
    return rows


def zeros(rows: np.ndarray, _: Any) -> np.ndarray:
    rows[2:5] = 0
    return rows


def foreign(rows: np.ndarray, earlier: list[np.ndarray]) -> np.ndarray:
    rows[-3:] = earlier[3][5:8]
    return rows


def twice(rows: np.ndarray, _: Any) -> np.ndarray:
    rows[1, 0, 0] = rows[1, 0, 1]
    return rows


def beyond(rows: np.ndarray, _: Any) -> np.ndarray:
    rows[1, 0, 0] = EXPERTS
    return rows


FAULTS = {
    "shifted": (shifted, "other experts"),
    "zeros": (zeros, "zeros"),
    "foreign": (foreign, "other experts"),
    "twice": (twice, "an expert twice"),
    "beyond": (beyond, "no such expert"),
}


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("by", ["weights", "itself"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_named(
    kind: str, by: str, fault: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Goal: each fault is counted by its name, and a prompt shows it. Method: a server that answers well at first."""
    change, name = FAULTS[fault]
    with serving(Engine(kind, late(change))) as url:
        status = verify(url, checkpoint if by == "weights" else checkpoint / "config.json")
    told = capsys.readouterr().out
    assert status == FAILED
    assert f" {name}" in next(line for line in told.splitlines() if line.startswith("wrong rows:")), told
    assert "shortest prompt with a wrong row: " in told


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_right_rows_are_right(kind: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: no false alarm. Method: a sound server, judged by its weights and by its own answers: nothing is wrong or
    missing."""
    with serving(Engine(kind, none)) as url:
        assert verify(url, checkpoint) == 0
        *_, whole = capsys.readouterr().out.splitlines()
        assert verify(url, checkpoint / "config.json") == 0
        *_, alone = capsys.readouterr().out.splitlines()
    right, *rest = map(int, whole.replace(",", "").split()[1:])
    assert (right > 400, rest) == (True, [0, 0, 0])
    compared, wrong, missing, unjudged = map(int, alone.replace(",", "").split()[1:])
    assert (wrong, missing, compared + unjudged) == (0, 0, right)
    assert compared > 150


def test_findings_are_json_for_programs(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: CI reads them. Method: wrong rows, to a file; right ones to standard output, where no other word is then,
    while people read the same on standard error. Neither has a bar that moves, as output is captured."""
    change, name = FAULTS["beyond"]
    with serving(Engine("vllm", late(change))) as url:
        assert verify(url, checkpoint, "--json", str(tmp_path / "found.json")) == FAILED
    said = capsys.readouterr()
    found = json.loads((tmp_path / "found.json").read_text())
    assert said.err == ""
    assert (found["ok"], found["engine"], found["url"]) == (False, "vLLM", url)
    assert sum(found["all"].values()) == sum(sum(rows.values()) for rows in found["rows"].values())
    assert found["faults"][name] == found["all"]["wrong"] > 0
    assert found["shortest"]["fault"] == name
    assert f"{len(found['shortest']['prompt'])} tokens" in said.out
    with serving(Engine("vllm", none)) as url:
        assert verify(url, checkpoint, "--json", "-") == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert (found["ok"], found["all"]["wrong"], found["shortest"], found["failed"]) == (True, 0, None, [])
    assert said.err.startswith(f"{url}: vLLM, ")


@pytest.mark.parametrize("family", ["llama4_text", "qwen3_vl_moe", "lfm2_moe", "deepseek_v4", "afmoe"])
def test_weights_of_other_kinds_of_models(family: str, tmp_path: Path) -> None:
    """Goal: a judge for models that read images, too, for routers that answer without ids, and for those that are given
    a bias, the tokens (hash layers) or a batch of sequences: each was an error. Method: the experts that the layers
    use; Llama 4's have a score above 0, others are called with ids."""
    make(family, tmp_path)
    spec = kvroute.routing_spec_from_hf(tmp_path, block_tokens=1)
    weights, tokens, used = Weights(tmp_path, spec, NOISE["float32"], torch.float32), list(range(5, 40)), []
    auto = AutoModelForImageTextToText if family == "qwen3_vl_moe" else AutoModelForCausalLM
    model = auto.from_pretrained(tmp_path, dtype=torch.float32).eval()
    for router in find_routers(model).values():
        router.register_forward_hook(lambda _module, _given, answer: used.append((answer[0] > 0).nonzero()[:, 1:]))
    routed = weights.routed(tokens)
    if family == "llama4_text":
        with torch.no_grad():
            model(torch.tensor([tokens]))
        expected = torch.stack(used, dim=1).numpy()
    else:
        expected = experts_of(model, torch.tensor([tokens]))
    assert np.array_equal(routed, np.sort(expected, axis=2))
    assert len(np.unique(routed)) > spec.row_shape[1]
    other = (routed + 1) % spec.attrs["num_experts"]
    everywhere = np.ones(routed.shape[:2], np.bool_)
    assert weights.close(routed, everywhere).all()
    assert not weights.close(other, everywhere).any()


def test_a_token_that_the_model_does_not_have_is_named(checkpoint: Path) -> None:
    """Goal: a line that says what is wrong, where torch would say that an index is out of range."""
    spec = kvroute.routing_spec_from_hf(checkpoint, block_tokens=1)
    weights = Weights(checkpoint, spec, NOISE["float32"], torch.float32)
    with pytest.raises(InvalidInputError, match=r"token ids: wanted below \d+, as the model has, got 99999999"):
        weights.routed([5, 99_999_999])


def test_close_choices_are_not_judged(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: rounding is no wrong row. Method: the server's routers are a little off, as another kernel's."""
    engine = Engine("vllm", none)
    with torch.no_grad():
        for layer in engine.model.model.layers:
            layer.mlp.gate.weight.mul_(1 + 1e-5 * torch.randn(layer.mlp.gate.weight.shape))
    with serving(engine) as url:
        assert verify(url, checkpoint) == 0
    assert " 0 " in capsys.readouterr().out.splitlines()[-1]


def test_a_server_that_computes_in_fewer_bits_is_not_called_wrong(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Goal: no false alarm for a float32 checkpoint that vLLM serves as it does by default. Method: a server whose
    model is the checkpoint in bfloat16, asked without ``--dtype`` and with that of the checkpoint.
    """
    engine = Engine("vllm", none)
    engine.model.to(torch.bfloat16)
    with serving(engine) as url:
        assert verify(url, checkpoint, "--dtype", "auto") == 0
        assert int(capsys.readouterr().out.splitlines()[-1].split()[-1]) > 0  # unjudged, and not counted as right
        assert verify(url, checkpoint) == FAILED


def test_what_does_not_come_is_missing(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: missing rows are no wrong ones. Method: answers without the field, -1 as SGLang has it, kvroute's error,
    a server without rows at all, and none that listens."""
    with serving(Engine("sglang", late(lambda rows, _: rows * 0 - 1))) as url:
        assert verify(url, checkpoint) == 0
    *_, rows, cause = capsys.readouterr().out.splitlines()
    *_, missing, unjudged = rows.split()
    assert (int(missing) > 100, unjudged) == (True, "0")
    assert cause == f"{missing} rows are missing: the answer does not say why"
    with serving(Engine("vllm", late(lambda *_: None))) as url:
        assert verify(url, checkpoint) == 0
        assert "answers have no rows: neither routed_experts" in capsys.readouterr().out
    with serving(Engine("kvroute", none)) as url:
        assert verify(url, checkpoint) == 0
        assert "rows were not kept" in capsys.readouterr().out
    with serving(Engine("vllm", lambda *_: None)) as url:
        assert verify(url, checkpoint) == USAGE
        assert "--enable-return-routed-experts" in capsys.readouterr().err
    for nothing in (url, "http://a b"):
        assert verify(nothing, checkpoint) == USAGE
        assert f"{nothing}/v1/models: wanted an answer" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://127.0.0.1:x", "http://[::1", "http://", "127.0.0.1:8000", "http://x:0"])
def test_what_is_no_url_is_said_at_once(url: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        verify(url, checkpoint)
    assert ended.value.code == USAGE
    assert f"argument --url: wanted http://HOST:PORT, got {url!r}" in capsys.readouterr().err


def test_an_answer_that_breaks_off_is_a_missing_one(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Method: a server that closes the connection in the middle of its answers."""
    with serving(Engine("vllm", none), cut=9) as url:
        assert verify(url, checkpoint) == USAGE
    assert "/v1/models: wanted an answer, got IncompleteRead" in capsys.readouterr().err


def test_an_id_of_more_bits_is_not_wrapped_into_an_expert() -> None:
    """Goal: an impossible id is wrong. Method: ids of 64 bits that are experts' after a cast to 32."""
    spec = kvroute.routing_spec(num_experts=8, top_k=1, layer_ids=[0], num_layers=1, block_tokens=4)
    for dtype, far in (("<i8", (1 << 32) + 3), ("<i8", -(1 << 32) + 3), ("<u8", (1 << 63) + 3)):
        file = io.BytesIO()
        np.save(file, np.array([2, far], dtype).reshape(2, 1, 1))
        assert rows_of(pybase64.b64encode_as_string(file.getvalue()), spec, 2).tolist() == [[[2]], [[-1]]]


def test_answers_that_no_engine_gives_are_errors_with_a_name() -> None:
    """Method: rows where the answer has no token that was read; JSON that is nested deeper than Python's stack."""
    spec = kvroute.routing_spec(EXPERTS, 2, (0, 1), 2, block_tokens=4)
    packed = pybase64.b64encode_as_string(np.zeros(8, "<i4").tobytes())
    with pytest.raises(RowError, match="routed_experts: wanted integers of 0 rows"):
        rows_of(packed, spec, 0)
    with pytest.raises(ServerError, match="wanted an answer in JSON"):
        decoded("http://server", b"[" * 100_000)
