"""Frames as inputs of MLflow's runs: hashed by their content, not stored, as the database has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd
    from mlflow.data.pandas_dataset import PandasDataset


def dataset_of(frame: pd.DataFrame, name: str) -> PandasDataset:
    """A frame as a dataset. MLflow itself would write the program's path and the user's name into it, which belong to
    this machine alone."""
    from mlflow.data.code_dataset_source import CodeDatasetSource
    from mlflow.data.pandas_dataset import from_pandas

    return from_pandas(frame, source=CodeDatasetSource({"mlflow.source.name": "trace-agent"}), name=name)
