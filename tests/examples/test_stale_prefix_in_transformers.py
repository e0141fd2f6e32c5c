"""The finding in transformers, end to end: old KV is served after a weight change, and every control is right.

A scene that becomes right is good news, and fails here on purpose: transformers was repaired, and the example, the page
of proofs and the adapter ``examples/managers/transformers_cache.py`` have to say since which version.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "stale_prefix_in_transformers.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stale_prefix_in_transformers", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore")  # of transformers and torch, about their own configuration
def test_old_kv_is_served_after_a_weight_change_and_by_nothing_else(example: ModuleType) -> None:
    """Goal: the finding is as told. Method: all scenes, each judged by generate() of the model with its new weights."""
    answers = {answer.scene.strip(): answer for answer in example.scenes()}
    stale = {"two sessions of a persistent manager", "weights updated inside pause()"}
    assert {scene for scene, answer in answers.items() if not answer.right} == stale
    whole_pages = (example.PROMPT_TOKENS - 1) // example.PAGE_TOKENS * example.PAGE_TOKENS
    assert {scene: answers[scene].cached for scene in stale} == dict.fromkeys(stale, whole_pages)
    assert all(answer.cached == 0 for scene, answer in answers.items() if scene not in stale)
