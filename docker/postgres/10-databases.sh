#!/bin/sh
# Runs once, when the data volume is new. Prefect and MLflow both own a table `alembic_version`, so each gets a database.
set -eu
for name in prefect mlflow; do
    createdb --username "$POSTGRES_USER" --owner "$POSTGRES_USER" "$name"
done
