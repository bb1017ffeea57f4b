"""It tells MLflow of a round: one run with its stages' runs below it, datasets, tables, traces and model versions."""
