"""The store: what happened, in SQL."""
