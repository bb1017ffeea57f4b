"""Labels of runs that agree on every label and differ in their draws only, without a row for each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from tasks.mining.labels import LABELS


@dataclass(frozen=True, eq=False)
class LabelMatrix:
    """What the bootstrap over verifier's checks gives: C capabilities, T trajectories, R runs. 20 capabilities x a
    million trajectories x 10 runs are 200 million labels, and 40 MB here."""

    capabilities: pd.Index
    trajectories: pd.Index
    label: npt.NDArray[np.int8]  # [C, T], places in LABELS
    weight: npt.NDArray[np.int16]  # [R, T], how often a run drew the trajectory
    passed: npt.NDArray[np.bool_]  # [T]

    @property
    def runs(self) -> int:
        return len(self.weight)

    @property
    def pairs(self) -> int:
        """Pairs of a capability and a trajectory."""
        return int(self.label.size)

    def counts(self) -> npt.NDArray[np.float64]:
        """Weighted trajectories [R, C, label, failed/passed]."""
        counts = np.zeros((self.runs, len(self.capabilities), 2 * len(LABELS)))
        cells = [2 * labels + self.passed for labels in self.label]  # int8 each
        for run, weight in enumerate(self.weight):
            drawn = weight.astype(np.float64)
            for capability, cell in enumerate(cells):
                counts[run, capability] = np.bincount(cell, weights=drawn, minlength=2 * len(LABELS))
        return counts.reshape(self.runs, len(self.capabilities), len(LABELS), 2)

    def frame(self) -> pd.DataFrame:
        """One row a label: run, trajectory_id, capability, label, weight, passed; ids and names are categoricals."""
        names, ids, runs = len(self.capabilities), len(self.trajectories), self.runs
        each = np.tile(np.arange(ids, dtype=np.int32), names * runs)
        columns: dict[str, Any] = {
            "run": np.repeat(np.arange(runs, dtype=np.int16), self.pairs),
            "trajectory_id": pd.Categorical.from_codes(each, categories=self.trajectories),
            "capability": pd.Categorical.from_codes(
                np.tile(np.repeat(np.arange(names, dtype=np.int16), ids), runs), categories=self.capabilities
            ),
            "label": pd.Categorical.from_codes(np.tile(self.label.reshape(-1), runs), categories=pd.Index(LABELS)),
            "weight": np.repeat(self.weight, names, axis=0).reshape(-1),
            "passed": np.tile(self.passed, names * runs),
        }
        return pd.DataFrame(columns, copy=False)
