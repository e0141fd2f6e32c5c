"""A hundred inputs that are wrong: each error names the field, what was wanted and what came."""

from __future__ import annotations

from pathlib import Path

import pytest
from wrong_inputs import INPUTS, Wrong, error_of

from kvroute.cli import COMMANDS
from kvroute.connector.settings import Settings

PARSED = ("are required", "invalid choice", "unrecognized arguments", "there is no store")
"""What a command line says in other words than wanted and got."""


@pytest.mark.parametrize("wrong", INPUTS, ids=[f"{wrong.where}: {wrong.what}" for wrong in INPUTS])
def test_an_error_names_the_field_and_what_was_wanted(wrong: Wrong, tmp_path: Path) -> None:
    """Goal: whoever reads it knows what to change. Method: the call in this process; a command ends with status 2 and
    one line."""
    text = error_of(wrong, tmp_path)
    assert wrong.field in text
    said = ": wanted " in text and ", got " in text
    assert said or (wrong.where == "command line" and any(words in text for words in PARSED)), text
    assert "Traceback" not in text


def test_they_are_of_every_place() -> None:
    """Each command that has an argument, and each setting, has a wrong one here."""
    assert len(INPUTS) >= 100
    typed = {wrong.what.split()[1] for wrong in INPUTS if wrong.where == "command line" and " " in wrong.what}
    assert typed >= COMMANDS.keys()
    assert {wrong.field for wrong in INPUTS} >= set(Settings.__struct_fields__)
