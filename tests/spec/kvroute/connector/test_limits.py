"""The limits of a connector: one frozen object, judged where it is made."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from cache_manager.errors import ConfigError
from kvroute.connector import Limits

PAGE = Path(__file__).parents[4] / "docs" / "concepts" / "connector.md"


def test_the_page_has_every_limit_with_its_default() -> None:
    """Goal: an operator finds what bounds an engine. Method: the page's table is the object's fields, in order."""
    rows = re.findall(r"^\| `(\w+_(?:s|max))` \| ([\d.]+) \|", PAGE.read_text(), re.MULTILINE)
    limits = Limits()
    names = [limit.name for limit in fields(Limits) if limit.name != "transfer"]
    assert rows == [(name, str(getattr(limits, name))) for name in names]


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("answer_s", -1.0, "seconds from 0"),
        ("answer_s", float("nan"), "seconds from 0"),
        ("fetch_s", "3", "seconds from 0"),
        ("question_s", float("inf"), "seconds from 0"),
        ("ends_max", 1.5, "a whole number from 0"),
        ("spares_max", True, "a whole number from 0"),
        ("idle_nbytes_max", -1, "a whole number from 0"),
        ("transfer", None, "TransferLimits"),
    ],
)
def test_a_limit_that_is_none_is_refused_by_name(name: str, value: Any, wanted: str) -> None:
    """Goal: the error names the limit, what was wanted and what came. Method: a value of another kind, or out of
    range."""
    with pytest.raises(ConfigError) as refused:
        Limits(**{name: value})
    assert (refused.value.field, refused.value.wanted) == (f"limits.{name}", wanted)
    assert repr(value) in str(refused.value)
