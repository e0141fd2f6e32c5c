"""The command line of the study: run it, or show what an earlier run found."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console

from bench.replay_study.report import print_results
from bench.replay_study.results import Results
from bench.replay_study.scales import PHASES, SCALES, Options
from bench.replay_study.study import Study
from cache_manager.errors import KVRouteError

RESULTS: Final = "replay-study.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, or 2 where it could not be started as asked."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.replay_study",
        description="mismatch of a trainer and its engine, without replay, R2 and R3",
    )
    add = parser.add_argument
    add("--device", default="cpu", choices=("cpu", "cuda"), help="(cpu)")
    add("--scale", choices=SCALES, help="(small; cuda: half-billion)")
    add("--quick", action="store_const", dest="scale", const="quick", help="as --scale quick")
    add("--minutes", type=float, metavar="N", help="as many steps as fit (as the scale says)")
    add("--seed", type=int, default=0, metavar="N", help="of weights, prompts and samples (0)")
    add("--learning-rate", type=float, metavar="R", help="of policy gradient (as the scale says)")
    add("--trainer-dtype", default="float32", choices=("float32", "bfloat16"), help="(float32)")
    add("--without", choices=PHASES[1:], help="a phase that is left out (none)")
    add("--out", type=Path, default=Path("replay-study"), metavar="DIR", help="for the numbers")
    add("--from", type=Path, dest="found", metavar="FILE", help="show what an earlier run wrote there")
    args, console = parser.parse_args(arguments), Console(width=None if sys.stdout.isatty() else 120)
    name = args.scale or ("half-billion" if args.device == "cuda" else "small")
    scale = SCALES[name]
    if args.minutes is not None and not args.minutes > 0:
        parser.error("--minutes: more than 0")
    if args.device == "cuda" and (scale.shape is None or not torch.cuda.is_available()):
        parser.error("--device: cuda wants an accelerator, and --scale tiny or half-billion")
    if args.learning_rate is not None:
        scale = replace(scale, reinforcement=replace(scale.reinforcement, learning_rate=args.learning_rate))
    phases = tuple(phase for phase in PHASES if phase != args.without)
    try:
        if args.found is not None:
            print_results(Results.read(args.found), console)
        else:
            options = Options(scale, args.device, args.minutes, args.seed, args.trainer_dtype, phases)
            replay_study(options, name, args.out, console)
    except (KVRouteError, OSError) as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return 2
    return 0


def replay_study(options: Options, name: str, out: Path, console: Console) -> Results:
    """Run the study; write its numbers to ``out`` and print them."""
    if options.device == "cpu":
        torch.set_num_threads(1)  # more would spend their time waiting for each other: the matrices are small
    out.mkdir(parents=True, exist_ok=True)
    setting = _setting(options, name)
    console.print(f"scale {name} on {setting['hardware']}: engine in bfloat16, trainer in {options.trainer_dtype}")
    results = Study(options, setting, out / RESULTS, console.print).run()
    console.print(f"{results.seconds:.0f} seconds; numbers: {out / RESULTS}")
    print_results(results, console)
    return results


def _setting(options: Options, name: str) -> dict[str, Any]:
    """Where and with which sizes: what a reader of the numbers must know."""
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
        "trainer_dtype": options.trainer_dtype,
        "phases": list(options.phases),
        "chance": options.scale.task.chance,
        "sizes": asdict(options.scale),
    }


if __name__ == "__main__":
    sys.exit(main())
