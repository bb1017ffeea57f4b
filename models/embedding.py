"""Embeddings of first observations from the base model itself: no second model is needed for retrieval."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from models.sampler import LocalPolicy

# Layers whose hidden states are averaged, for a model of 30; other depths take the same shares.
FROM, TO, OF = 8, 25, 30


def layer_range(layers: int) -> tuple[int, int]:
    """First and last layer to average in a model of `layers`."""
    return round(FROM * layers / OF), max(1, round(TO * layers / OF))


def embed(policy: LocalPolicy, prompts: Sequence[Sequence[int]], shared: int) -> npt.NDArray[np.float32]:
    """(n, hidden) mean hidden state of the base over the tokens after the shared prefix, averaged over middle layers."""
    first, last = layer_range(policy.model.config.num_hidden_layers)
    vectors = policy.hidden_means(prompts, shared, range(first, last + 1))
    return vectors.float().cpu().numpy()
