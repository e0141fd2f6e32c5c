"""The command line of the study: run it, or print an earlier run's results."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch

from bench.replay_study.results import Results, print_results
from bench.replay_study.scales import SCALES, Options
from bench.replay_study.study import Study
from cache_manager.errors import KVRouteError

RESULTS: Final = "replay-study.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, or 2 if it could not be run."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.replay_study",
        description="mismatch of a trainer and its engine, without replay, R2 and R3",
    )
    add = parser.add_argument
    add("--device", default="cpu", choices=("cpu", "cuda"), help="(cpu)")
    add("--scale", choices=SCALES, help="(tiny; cuda: half-billion)")
    add("--quick", action="store_const", dest="scale", const="quick", help="as --scale quick")
    add("--minutes", type=float, metavar="N", help="as many steps as fit (as the scale says)")
    add("--seed", type=int, default=0, metavar="N", help="of weights, prompts and samples (0)")
    add("--out", type=Path, default=Path("replay-study"), metavar="DIR", help="for the numbers")
    add("--from", type=Path, dest="found", metavar="FILE", help="print the results that an earlier run wrote there")
    args = parser.parse_args(arguments)
    name = args.scale or ("half-billion" if args.device == "cuda" else "tiny")
    if args.minutes is not None and not args.minutes > 0:
        parser.error("--minutes: more than 0")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: cuda wants an accelerator")
    try:
        if args.found is not None:
            print_results(Results.read(args.found), print)
        else:
            replay_study(Options(SCALES[name], args.device, args.minutes, args.seed), name, args.out)
    except (KVRouteError, OSError) as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return 2
    return 0


def replay_study(options: Options, name: str, out: Path, say: Callable[[str], object] = print) -> Results:
    """Run the study; write its numbers to ``out`` and print them."""
    if options.device == "cpu":
        torch.set_num_threads(1)  # more threads would wait for each other: the matrices are small
    out.mkdir(parents=True, exist_ok=True)
    setting = _setting(options, name)
    say(f"scale {name} on {setting['hardware']}: engine in bfloat16, trainer in float32")
    results = Study(options, setting, out / RESULTS, say).run()
    say(f"{results.seconds:.0f} seconds; numbers: {out / RESULTS}")
    print_results(results, say)
    return results


def _setting(options: Options, name: str) -> dict[str, Any]:
    """The machine, versions and sizes, for readers of the numbers."""
    import transformers

    cuda = options.device == "cuda"
    return {
        "scale": name,
        "seed": options.seed,
        "minutes": options.minutes,
        "hardware": torch.cuda.get_device_name() if cuda else f"CPU ({platform.machine()}), 1 thread",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "engine_dtype": "bfloat16",
        "trainer_dtype": "float32",
        "chance": options.scale.task.chance,
        "sizes": asdict(options.scale),
    }


if __name__ == "__main__":
    sys.exit(main())
