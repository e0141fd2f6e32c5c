"""Different weights have different names, and so have different computations with the same weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from cache_manager.errors import ConfigError
from kvroute.weights import configuration_digest, weights_digest


class Format(Enum):
    DUMMY = "dummy"


def test_a_digest_names_the_files(tmp_path: Path) -> None:
    """Goal: names are equal for the very same files only. Method: change a byte, the time, the name, and back."""
    home = tmp_path / "model"
    home.mkdir()
    file = home / "model.safetensors"
    file.write_bytes(bytes(200_000))
    os.utime(file, ns=(1, 1))
    before = weights_digest(str(home))
    (home / "README.md").write_text("no weights")
    assert weights_digest(str(home)) == before
    changed = bytearray(200_000)
    changed[100_001] = 1
    for content, time, same in ((changed, 1, False), (bytes(200_000), 2, False), (bytes(200_000), 1, True)):
        file.write_bytes(content)
        os.utime(file, ns=(time, time))
        assert (weights_digest(str(home)) == before) == same
    file.rename(home / "other.safetensors")
    assert weights_digest(str(home)) != before


def test_a_hub_name_is_digested_by_name_and_revision() -> None:
    assert weights_digest("org/model", "a") != weights_digest("org/model", "b") != weights_digest("org/other", "b")


def test_a_file_of_weights_is_digested_by_its_content(tmp_path: Path) -> None:
    """Goal: a GGUF file that is replaced in place is other weights."""
    file = tmp_path / "model.gguf"
    digests = []
    for content in (b"one", b"two"):
        file.write_bytes(content)
        os.utime(file, ns=(1, 1))
        digests.append(weights_digest(str(file)))
    assert len(set(digests)) == 2


CONFIG: Mapping[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
    "num_experts": 16,
    "dtype": torch.float32,
    "id2label": {0: "a", 1: "b"},
    "_name_or_path": "/one",
}


def test_equal_configurations_have_one_digest_wherever_they_come_from() -> None:
    """Goal: names, the order of keys and types that JSON does not have make no difference."""
    digest = configuration_digest(CONFIG, dtype=torch.float32, load_format=Format.DUMMY)
    same = dict(reversed(list(CONFIG.items())))
    same |= {"_name_or_path": "/two", "transformers_version": "9", "architectures": ("Qwen3MoeForCausalLM",)}
    same |= {"dtype": "torch.float32", "id2label": {"0": "a", "1": "b"}}
    assert configuration_digest(same, load_format="dummy", dtype="torch.float32") == digest
    script = "import json, sys; from kvroute.weights import configuration_digest as d; print(d(json.load(sys.stdin)))"
    given = json.dumps({key: value for key, value in CONFIG.items() if key != "dtype"})
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    other = subprocess.run([sys.executable, "-c", script], input=given, env=environment, text=True, capture_output=True)
    assert other.stdout.strip() == configuration_digest(json.loads(given))


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0}},
        {"num_experts": 17},
        {"dtype": torch.bfloat16},
        {"architectures": ["MixtralForCausalLM"]},
        {"new_key": False},
    ],
)
def test_configurations_that_compute_differently_have_different_digests(change: Mapping[str, Any]) -> None:
    assert configuration_digest({**CONFIG, **change}) != configuration_digest(CONFIG)


def test_the_engines_own_choices_are_part_of_a_digest() -> None:
    choices: list[Mapping[str, Any]] = [
        {},
        {"dtype": "float32"},
        {"kv": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "float32", "quantization": "fp8"},
        {"dtype": "float32", "load_format": "dummy"},
    ]
    assert len({configuration_digest(CONFIG, **others) for others in choices}) == len(choices)


def test_a_nested_configuration_is_digested_by_its_values() -> None:
    """Goal: an object counts as its dict, and one without a text of its own is refused by the name of its field."""
    nested = PretrainedConfig(rope_theta=1e4)
    assert configuration_digest({"text_config": nested}) == configuration_digest({"text_config": nested.to_dict()})
    with pytest.raises(ConfigError, match=r"config\.text_config\.rope\[1\].*object"):
        configuration_digest({"text_config": {"rope": [1, object()]}})
