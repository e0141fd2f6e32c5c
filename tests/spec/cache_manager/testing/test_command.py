"""The command line of the life-cycle kit."""

from __future__ import annotations

import re

from cache_manager.testing.life import (
    INVARIANTS,
)
from kvroute.cli import FAILED, USAGE, main


def test_the_command_line(capsys) -> None:
    """Goal: status, summary, story and list of ``kvroute prove``. Method: a sound manager, a leaky one, wrong names."""
    few = ["--examples", "60", "--steps", "30"]
    assert main(["prove", "tiny_managers:Sharing", *few]) == 0
    out = capsys.readouterr().out
    assert "every invariant held" in out
    assert "capabilities  prefix" in out
    assert main(["prove", "tiny_faults:Leaky", *few, "--seed", "3"]) == FAILED
    out = capsys.readouterr().out
    assert "no_block_lost" in out
    assert "seed 3, " in out
    capsys.readouterr()
    assert main(["prove", "--invariants"]) == 0
    assert set(re.findall("^[a-z_]+$", capsys.readouterr().out, flags=re.MULTILINE)) == INVARIANTS.keys()
    for wrong in ("tiny_managers", "no_such_module:Plain", "tiny_managers:Block", "tiny_faults:FAULTS"):
        assert main(["prove", wrong]) == USAGE
        assert "wanted MODULE:ADAPTER" in capsys.readouterr().err
    assert main(["prove", "tiny_managers:Shared"]) == USAGE
    assert re.search(r"got tiny_managers:Shared; tiny_managers has .*\bSharing\b", capsys.readouterr().err)
