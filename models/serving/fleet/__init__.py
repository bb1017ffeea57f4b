"""Keeping servers equal to one release, whole: load, prove, swap, drain, unload."""
