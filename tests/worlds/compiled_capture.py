"""Compiles the capture launch for a GPU, which takes none: prints how wide its stores to the host are."""

from __future__ import annotations

import re
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import kvroute
from cache_manager.spec import RecordLayout
from kvroute.capture import kernel
from kvroute.capture.plan import Plan

HOPPER = GPUTarget("cuda", 90, 32)


def ptx(layers: int, experts: int, group: int) -> str:
    plan = Plan.of(RecordLayout([kvroute.routing_spec(experts, 8, range(layers), layers, 64)]))
    launch = kernel.Launch(plan, [torch.int32], 4096, torch.device("cpu"), group)
    compiled = launch.constants
    function: Any = kernel.capture_all
    types = ["*i64", "*i64", "*u8", "*i32", "*i32", "i64", "i32", *["constexpr"] * len(compiled)]
    first = len(types) - len(compiled)
    aligned = {(i,): [["tt.divisibility", 16]] for i in (2, 3, 4)}
    source = ASTSource(
        function,
        dict(zip(function.arg_names, types, strict=True)),
        {(first + i,): each for i, each in enumerate(compiled)},
        aligned,
    )
    made: str = triton.compile(source, target=HOPPER, options={"num_warps": launch.warps}).asm["ptx"]
    return made


if __name__ == "__main__":
    for layers, experts in ((58, 256), (60, 384)):
        for group in (1, kernel.GROUP_TOKENS):
            made = ptx(layers, experts, group)
            stores, loads = re.findall(r"st\.global\.(\S+)", made), len(re.findall(r"ld\.global", made))
            print(f"{layers}x8 of {experts}, {group}:", *sorted(set(stores)), f"{loads} loads")
