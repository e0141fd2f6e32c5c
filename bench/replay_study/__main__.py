"""The command line of the study."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.replay_study.command import replay_study, show_study
from bench.replay_study.options import PHASES, StudyOptions
from cache_manager.errors import KVRouteError


def _phases(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, or 2 where it could not be started as asked."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.replay_study",
        description="mismatch of a trainer and its engine, without replay, R2 and R3",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (cpu)")
    parser.add_argument(
        "--scale", metavar="NAME", help="quick, small, tiny or half-billion (small; cuda: half-billion)"
    )
    parser.add_argument("--quick", action="store_const", dest="scale", const="quick", help="as --scale quick")
    parser.add_argument("--minutes", type=float, metavar="N", help="as many steps as fit (as the scale says)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights, prompts and samples (0)")
    parser.add_argument("--learning-rate", type=float, metavar="R", help="of policy gradient (as the scale says)")
    parser.add_argument("--trainer-dtype", default="float32", metavar="DTYPE", help="float32 or bfloat16 (float32)")
    parser.add_argument(
        "--phases", type=_phases, default=PHASES, metavar="LIST", help="some of learning,mismatch,policy-gradient (all)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("replay-study"), metavar="DIR", help="for numbers and pictures"
    )
    parser.add_argument("--from", type=Path, dest="found", metavar="FILE", help="show what an earlier run wrote there")
    chosen = vars(parser.parse_args(arguments))
    console, found = Console(width=None if sys.stdout.isatty() else 120), chosen.pop("found")
    try:
        if found is not None:
            return show_study(found, chosen["out"], console)
        return replay_study(StudyOptions(**chosen), console)
    except KVRouteError as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
    except KeyboardInterrupt:
        sys.stderr.write(f"{parser.prog}: interrupted\n")
        return 130
    return 2


if __name__ == "__main__":
    sys.exit(main())
