"""Prefect flows and the command line: order and parameters, no logic."""

from models.own_modules import own_first

own_first()
