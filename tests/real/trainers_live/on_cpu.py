"""A plugin of vLLM, for machines without a GPU."""

from dataclasses import replace
from typing import Any


def register() -> None:
    """The scheduler waits for what a store has longer than it would for users, because a loaded machine may need more
    than a second. And what vLLM does on a GPU, and not here, is done."""
    import vllm

    from kvroute.integrations.vllm import config

    config.ENGINE_LIMITS = replace(config.ENGINE_LIMITS, question_s=60.0)
    if [int(part) for part in vllm.__version__.split(".")[:2]] < [0, 30]:
        import cpu_choices  # noqa: F401 - experts are chosen by the layer's router

        pack_once()
    else:
        pack_again()


def pack_once() -> None:
    """verl processes weights after an update: here they are packed already, and stay as they are."""
    from vllm.model_executor.model_loader import utils

    process = utils.process_weights_after_loading

    def process_once(model: Any, *rest: Any) -> None:
        if not any(hasattr(module, "cpu_linear") for module in model.modules()):
            process(model, *rest)

    utils.process_weights_after_loading = process_once


def pack_again() -> None:
    """vLLM loads all weights again for an update, and packs those of experts for a CPU the first time alone."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    setup = UnquantizedFusedMoEMethod._setup_kernel

    def setup_and_pack(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        again = self.moe_kernel is not None
        setup(self, layer, w13, w2)
        if again:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = setup_and_pack
