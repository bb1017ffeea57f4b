"""Prefect flows and the command line: order and parameters, no logic."""
