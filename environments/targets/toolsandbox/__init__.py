"""apple/ToolSandbox as a target, from a local checkout. Nothing of its code is copied here.

Importing this folder imports nothing of tool_sandbox: the catalogue must describe what is absent.
"""

from environments.targets.toolsandbox.data import VARIANTS, describe

__all__ = ["VARIANTS", "describe"]
