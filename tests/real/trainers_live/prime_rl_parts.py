"""prime-rl's plugin of vLLM without the two of its patches that want torchvision, for adapters (LoRA)."""

from __future__ import annotations


def register() -> None:
    from prime_rl.inference import patches

    patches.monkey_patch_nano_v3_reasoning_parser()
    patches.monkey_patch_qwen3_coder_param_newline_trim()
    patches.monkey_patch_minimax_m2_think_end_passthrough()
    patches.monkey_patch_return_routed_experts_with_nixl_connector()
    patches.monkey_patch_kv_xfer_finished_tolerate_freed()
    patches.monkey_patch_online_fp8_parameter_cast()
