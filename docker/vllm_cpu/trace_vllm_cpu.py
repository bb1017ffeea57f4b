"""Keeps the base of vLLM's CPU build what it is beside adapters. vLLM finds this plugin by its entry point and loads it
in each of its processes; `make install-vllm` installs it.

In a batch, tokens without an adapter have the index -1. The kernels for GPUs skip them; the CPU's operations take -1
for the last of the `--max-loras` slots (vLLM 0.32.0, `vllm/lora/ops/torch_ops`). Once that many adapters were used,
whatever was unloaded since, requests for the base get the last one's weights whenever they share a batch with an
adapter's.
"""

import functools
import logging

logger = logging.getLogger("vllm.trace")


def register() -> None:
    """Make the first of an adapter's two products zero for tokens without one. vLLM may call this several times."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
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
