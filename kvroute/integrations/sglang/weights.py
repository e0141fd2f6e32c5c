"""The weights by which SGLang's kernels count the chosen experts, taken where the experts are given them.

SGLang's capture has ids alone. Its ``FusedMoE`` is called with a choice, which has ids and weights of one computation,
and gives both to the kernel as they are. So weights are taken there, with the ids beside them, in one tensor; a pass
whose experts were given other ids than its routers told has neither. The host compares them when the pass is over: no
step on a device waits for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from cache_manager.errors import ConfigError
from cache_manager.spec import AuxBlockDataSpec
from kvroute.capture.errors import CaptureError
from kvroute.capture.hooks import MISSED, ONCE, OWN, Hooks, Values
from kvroute.capture.step_ids import NO_ID, StepIds
from kvroute.integrations.sglang.routers import ROUTERS, TOPK
from kvroute.routing import routing_weights_spec

EXPERTS_CLASS: Final = "FusedMoE"
"""SGLang's class of the experts of a layer."""
KERNEL: Final = "UnquantizedFusedMoEMethod"
"""SGLang's class of the kernel that was judged."""
RUNNER: Final = "triton"
"""SGLang's name of what runs that kernel on a GPU, as it was judged. It only reads what it is given."""
FACTORS: Final = ("routed_scaling_factor", "route_scale", "router_scaling_factor")
"""SGLang's names of a number by which experts' outputs are multiplied behind the kernel, or weights before it."""
NOT_GIVEN: Final = {
    MISSED: "a layer's experts were not given weights in a pass",
    ONCE: "a layer's experts were given weights twice in a pass",
    OWN: "a layer's experts were given the memory of another's weights",
}
OTHER_FORM: Final = "experts were given weights that are not float32, or not one for each id"
GIVEN_OTHER_TOKENS: Final = "experts were given weights of other tokens than the pass has"
OTHER_IDS: Final = "experts were given other ids than the routers told"
IDS_ALONE: Final = "a pass has ids, and no weights of them"


class Given(Protocol):
    """What the experts of the model's layers are given in the current pass.

    ``hook(layer_id)`` makes what a layer's experts call with their choice, whose ``topk_ids`` and ``topk_weights`` are
    ``[tokens, top_k]``.
    """

    def hook(self, layer_id: int) -> Callable[[Any], None]: ...

    def begin(self) -> None:
        """A pass begins: what experts were given before, for example in a warm-up, is discarded."""

    def take(self, tokens: int) -> torch.Tensor | str:
        """The ids of all layers and behind them the bits of their weights, int32 ``[tokens, 2 * layers, top_k]``, of
        the pass's first tokens; or why there are none. The caller owns the tensor: see :func:`weights_of`."""


class GivenWeights:
    """A :class:`Given` on a CPU. It keeps a copy of each choice: what the kernel makes of its memory changes none of
    it."""

    def __init__(self, routing: AuxBlockDataSpec) -> None:
        self.spec = routing_weights_spec(routing)
        layer_ids = routing.attrs["layer_ids"]
        top_k = routing.row_shape[1]
        ids = Values(routing.name, layer_ids, top_k, (torch.int32, torch.int64))
        weights = Values(self.spec.name, layer_ids, top_k, (torch.float32,))
        self._ids_name = routing.name
        self._layers = len(layer_ids)
        self._hooks = Hooks([ids, weights])

    def hook(self, layer_id: int) -> Callable[[Any], None]:
        """What a layer's experts call with their choice."""
        keep_ids = self._hooks.hook(layer_id, self._ids_name)
        keep_weights = self._hooks.hook(layer_id, self.spec.name)

        def keep(choice: Any) -> None:
            keep_ids(choice.topk_ids.clone())
            keep_weights(choice.topk_weights.clone())

        return keep

    def begin(self) -> None:
        """A pass begins: what experts were given before, for example in a warm-up, is discarded."""
        self._hooks.clear()

    def take(self, tokens: int) -> torch.Tensor | str:
        """As :meth:`Given.take`. The hooks are then ready for the next pass."""
        try:
            sources, *_ = self._hooks.taken()
        except CaptureError as error:
            return NOT_GIVEN.get(str(error.wanted), OTHER_FORM)
        finally:
            self._hooks.clear()
        if len(sources[0]) != tokens:
            return GIVEN_OTHER_TOKENS
        ids = [source.to(torch.int32) for source in sources[: self._layers]]
        return torch.stack([*ids, *(source.view(torch.int32) for source in sources[self._layers :])], 1)


class GivenOnDevice:
    """A :class:`Given` beside a device, of passes of at most ``max_tokens`` tokens, in CUDA graphs too: one launch a
    pass. It refers to each choice until the last layer's experts are given theirs, so their kernel may not write over
    it: see :data:`RUNNER`."""

    def __init__(self, routing: AuxBlockDataSpec, max_tokens: int, device: torch.device) -> None:
        self._pass = StepIds(routing, max_tokens, device, weights=True)

    def hook(self, layer_id: int) -> Callable[[Any], None]:
        """What a layer's experts call with their choice."""
        keep_ids = self._pass.hook(layer_id)
        keep_weights = self._pass.hook_weights(layer_id)

        def keep(choice: Any) -> None:
            keep_ids(choice.topk_ids)
            keep_weights(choice.topk_weights)

        return keep

    def begin(self) -> None:
        """A pass begins: what experts were given before is discarded, on the stream of the pass."""
        self._pass.begin()

    def take(self, tokens: int) -> torch.Tensor | str:
        """As :meth:`Given.take`. What the device did not write is :data:`NO_ID`."""
        rows = self._pass.take(tokens)
        return rows if isinstance(rows, str) else rows.clone()


def given_of(routing: AuxBlockDataSpec, buffer: torch.Tensor) -> Given:
    """The :class:`Given` of an engine whose routers' ids are in this ``buffer [tokens, ...]``, on the same device."""
    if buffer.device.type == "cpu":
        return GivenWeights(routing)
    return GivenOnDevice(routing, len(buffer), buffer.device)


def weights_of(ids: NDArray[np.int32], given: NDArray[np.int32] | None) -> NDArray[np.float32] | str:
    """The weights ``[tokens, layers, top_k]`` of the ``ids`` of the same shape that a pass's routers told, in what its
    experts were ``given``, or why there are none."""
    if given is None:
        return IDS_ALONE
    layers = ids.shape[1]
    its_ids = given[:, :layers]
    if (its_ids != ids).any():
        absent = (its_ids == NO_ID).all(axis=(1, 2)).any()
        return NOT_GIVEN[MISSED] if absent else OTHER_IDS
    return given[:, layers:].view(np.float32)


def bind_weights(
    model: Any,
    configuration: Any,
    layers: Sequence[int],
    hook_of: Callable[[int], Callable[[Any], None]],
    *,
    on_device: bool = False,
) -> None:
    """Have ``hook_of(layer)`` called with the choice that the experts of each of these ``layers`` are given.

    ``configuration`` is that of the model's text. Raises :class:`ConfigError` that names the module, before any is
    hooked, where what the experts are given is not the weight by which the model counts them: a factor before or behind
    the kernel, weights that count an expert's input, shared experts among the chosen ones, other kernels than
    :data:`KERNEL`, and experts or routers of other classes; ``on_device`` also runners other than :data:`RUNNER`.
    """
    check_factors("the model's configuration", configuration)
    experts: dict[int, Any] = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in ROUTERS and kind != TOPK:
            raise _refused(name, f"routers of {TOPK}", kind)
        check_factors(name, module)
        check_factors(name, getattr(module, "topk_config", None))
        layer: int = getattr(module, "layer_id", -1)  # a kernel is a module, too, of no layer
        if not hasattr(module, "moe_runner_config") or layer not in layers:
            continue
        check_experts(name, module)
        if on_device:
            check_runner(name, module.quant_method)
        if layer in experts:
            raise _refused(name, f"one {EXPERTS_CLASS} in each MoE layer", f"another one in layer {layer}")
        experts[layer] = module
    if absent := sorted(set(layers) - set(experts)):
        raise _refused("the model", f"one {EXPERTS_CLASS} in each MoE layer", f"none in {absent}")
    for layer, module in experts.items():
        module.forward = telling(module.forward, hook_of(layer))


def check_factors(name: str, holder: Any) -> None:
    """Raise :class:`ConfigError` if ``holder``, a module or a configuration of this ``name``, has a factor."""
    for factor in FACTORS:
        value = getattr(holder, factor, None)
        if value is not None and not (isinstance(value, (int, float)) and value == 1):
            wanted = "1 or none: SGLang multiplies by it outside the kernel, which nothing has judged"
            raise _refused(f"{factor} of {name}", wanted, value)


def check_experts(name: str, experts: Any) -> None:
    """Raise :class:`ConfigError` unless the kernel of ``experts`` counts their outputs by what it is given."""
    kind = type(experts).__name__
    kernel = type(experts.quant_method).__name__
    config = experts.moe_runner_config
    if kind != EXPERTS_CLASS:
        raise _refused(name, f"experts of {EXPERTS_CLASS}", kind)
    if kernel != KERNEL:
        raise _refused(name, f"a kernel of {KERNEL}: others were not judged", kernel)
    if config.apply_router_weight_on_input:
        raise _refused(name, "weights that count an expert's output", "some that count its input")
    if config.num_fused_shared_experts:
        wanted = "no shared experts among the chosen ones: not judged"
        raise _refused(name, wanted, f"{config.num_fused_shared_experts} of them")
    check_factors(name, config)


def check_runner(name: str, kernel: Any) -> None:
    """Raise :class:`ConfigError` unless the ``kernel`` of the experts of this ``name`` is run by :data:`RUNNER`."""
    backend = getattr(getattr(kernel, "runner", None), "runner_backend", None)
    runner = getattr(backend, "value", backend)
    if runner != RUNNER:
        wanted = f"a kernel that {RUNNER!r} runs on a device (--moe-runner-backend {RUNNER}): others were not judged"
        raise _refused(name, wanted, runner)


def _refused(what: str, wanted: str, got: Any) -> ConfigError:
    return ConfigError(f"SGLang with kvroute: routing_weights, {what}", wanted, got)


def telling(forward: Callable[..., Any], keep: Callable[[Any], None]) -> Callable[..., Any]:
    """``forward`` of a layer's experts, which also gives ``keep`` its choice, before the kernel has it."""

    @wraps(forward)
    def given(hidden_states: Any, topk_output: Any, *more: Any, **named: Any) -> Any:
        keep(topk_output)
        return forward(hidden_states, topk_output, *more, **named)

    return given


__all__ = [
    "EXPERTS_CLASS",
    "FACTORS",
    "KERNEL",
    "RUNNER",
    "Given",
    "GivenOnDevice",
    "GivenWeights",
    "bind_weights",
    "given_of",
    "weights_of",
]
