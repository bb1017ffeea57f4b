"""Keeps the base of vLLM's CPU build what it is beside adapters. vLLM finds this plugin by its entry point and loads it
in each of its processes; `make install-vllm` installs it.

In a batch, tokens without an adapter have the index -1. The kernels for GPUs skip them; the CPU's operations take -1
for the last of the `--max-loras` slots (vLLM 0.32.0, `vllm/lora/ops/torch_ops`). Once that many adapters were used,
whatever was unloaded since, requests for the base get the last one's weights whenever they share a batch with an
adapter's.

With LoRA on, vLLM computes experts by Triton, which a CPU does not have: the first request to a model with experts ends
the engine. Where `--lora-target-modules` leaves the experts without adapters, they are computed as without LoRA; else
the server does not start, and says what to do.
"""

import functools
import logging

# The last parts of the names that vLLM has for what holds experts.
EXPERTS = {"experts", "gate_up_proj", "gate_proj", "up_proj", "down_proj"}
logger = logging.getLogger("vllm.trace")


def register() -> None:
    """Both of it, on a CPU. vLLM may call this several times."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _spare_the_base()
        _plain_experts()


def _spare_the_base() -> None:
    """The first of an adapter's two products is zero for tokens without one."""
    try:
        from vllm.lora.ops import torch_ops
        from vllm.lora.ops.torch_ops import lora_ops
        from vllm.lora.punica_wrapper import punica_cpu

        shrink = lora_ops.bgmv_shrink
    except (ImportError, AttributeError) as problem:
        logger.warning("this vLLM is built otherwise (%s): check that its base is right beside adapters", problem)
        return
    if hasattr(shrink, "__wrapped__"):
        return

    @functools.wraps(shrink)
    def spared(inputs, weights, output, indices, scaling=1.0):
        """output (tokens, rank) = scaling * inputs x weights[indices]; zero where the index is negative."""
        shrink(inputs, weights, output, indices, scaling)
        output.masked_fill_((indices < 0).unsqueeze(1), 0)

    for place in (lora_ops, torch_ops, punica_cpu):
        place.bgmv_shrink = spared


def _plain_experts() -> None:
    """Experts that no adapter may change are computed as without LoRA; that one may change them is refused."""
    try:
        from vllm.config import get_current_vllm_config
        from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
        from vllm.triton_utils import HAS_TRITON

        finish = FusedMoEConfig.__post_init__
    except (ImportError, AttributeError) as problem:
        logger.warning("this vLLM is built otherwise (%s): a model with experts may end it when LoRA is on", problem)
        return
    if hasattr(finish, "__wrapped__"):
        return

    @functools.wraps(finish)
    def finished(self):
        lora = get_current_vllm_config().lora_config
        if lora is not None:
            adapted = {name.rsplit(".", 1)[-1] for name in lora.target_modules or EXPERTS}
            if not adapted & EXPERTS:
                self.is_lora_enabled = False
            elif not HAS_TRITON:
                raise ValueError(
                    f"adapters on experts ({', '.join(sorted(adapted & EXPERTS))}) need Triton, which is not here; "
                    "start the server with --lora-target-modules q_proj k_proj v_proj o_proj"
                )
        finish(self)

    FusedMoEConfig.__post_init__ = finished
