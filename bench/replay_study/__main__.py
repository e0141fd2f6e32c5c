"""The command line of the study: run it, or print an earlier run's results."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import torch

from bench.replay_study.results import Results, merged, print_results
from bench.replay_study.scales import DENOMINATORS, FAMILIES, PHASES, SCALES, Options
from bench.replay_study.study import Study
from cache_manager.errors import KVRouteError

RESULTS: Final = "replay-study.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, or 2 if it could not be run."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.replay_study",
        description="how far a trainer is from its engine without rows, with right and with wrong ones",
    )
    add = parser.add_argument
    add("--device", default="cpu", choices=("cpu", "cuda"), help="(cpu)")
    add("--scale", choices=SCALES, help="(tiny; cuda: third-billion)")
    add("--quick", action="store_const", dest="scale", const="quick", help="as --scale quick")
    add("--minutes", type=float, metavar="N", help="as many steps as fit (as the scale says)")
    add("--seed", type=int, default=0, metavar="N", help="of weights, prompts and samples (0)")
    add("--seeds", type=int, metavar="N", help="how many (3)")
    add("--family", action="append", choices=FAMILIES, dest="families", help="one or more (all)")
    add("--phase", action="append", choices=PHASES, dest="phases", help="one or more (all)")
    add("--steps", type=int, metavar="N", help="of policy gradient, at most (as the scale says)")
    add(
        "--ratio", action="append", choices=DENOMINATORS, dest="ratios", help="to whose probabilities (engine, trainer)"
    )
    add("--state", metavar="DIR", help="weights that were learnt are kept and found there")
    add("--out", type=Path, default=Path("replay-study"), metavar="DIR", help="for the numbers")
    words = "print the results that earlier runs wrote there, as one"
    add("--from", type=Path, nargs="+", dest="found", metavar="FILE", help=words)
    args = parser.parse_args(arguments)
    name = args.scale or ("third-billion" if args.device == "cuda" else "tiny")
    if args.minutes is not None and not args.minutes > 0:
        parser.error("--minutes: more than 0")
    if args.seeds is not None and args.seeds < 1:
        parser.error("--seeds: at least 1")
    if args.steps is not None and args.steps < 1:
        parser.error("--steps: at least 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: cuda wants an accelerator")
    try:
        if args.found is not None:
            print_results(merged([Results.read(path) for path in args.found]), print)
        else:
            scale = SCALES[name] if args.seeds is None else replace(SCALES[name], seeds=args.seeds)
            if args.steps is not None:
                scale = replace(scale, reinforcement=replace(scale.reinforcement, steps=args.steps))
            families = tuple(args.families or FAMILIES)
            phases = tuple(args.phases or PHASES)
            ratios = tuple(args.ratios or DENOMINATORS)
            options = Options(scale, args.device, args.minutes, args.seed, families, phases, args.state, ratios)
            replay_study(options, name, args.out)
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
        "chance": options.scale.short.chance,
        "sizes": asdict(options.scale),
    }


if __name__ == "__main__":
    sys.exit(main())
