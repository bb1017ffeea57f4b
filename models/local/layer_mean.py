"""The mean of a range of decoder layers' outputs, taken while a forward pass runs, which ends after the range."""

from __future__ import annotations

from typing import Any

import torch


class LayerMean:
    """Within `with`, `decoder` (a module with `layers`) ends after layer `last`, and `mean` is, after each pass, the
    mean (N, hidden) of the outputs of layers `first` to `last` (from 1, both included) for one batch of N tokens.

    A pass that ends early stores keys and values of its layers only: compute shared prefixes before.
    """

    def __init__(self, decoder: Any, first: int, last: int) -> None:
        self.decoder, self.first, self.last = decoder, first, last
        self.total = torch.empty(0)

    def __enter__(self) -> LayerMean:
        self.layers = self.decoder.layers
        used = self.layers[self.first - 1 : self.last]
        self.handles = [layer.register_forward_hook(self._add if i else self._begin) for i, layer in enumerate(used)]
        self.decoder.layers = self.layers[: self.last]
        return self

    def __exit__(self, *_: object) -> None:
        self.decoder.layers = self.layers
        for handle in self.handles:
            handle.remove()

    def _begin(self, module: Any, inputs: Any, output: Any) -> None:
        self.total = _states(output).float()

    def _add(self, module: Any, inputs: Any, output: Any) -> None:
        self.total = self.total + _states(output).float()

    @property
    def mean(self) -> torch.Tensor:
        return self.total / (self.last - self.first + 1)


def _states(output: Any) -> torch.Tensor:
    """A decoder layer's output is a tensor (1, N, hidden), or a tuple that begins with one."""
    states: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return states[0]
