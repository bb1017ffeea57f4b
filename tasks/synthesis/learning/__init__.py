"""Adapters that learn from what has succeeded: the generalist, and what it learns from."""
