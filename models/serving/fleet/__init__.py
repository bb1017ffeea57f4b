"""Keeping servers equal to the registry's champions: load, prove, route, drain, unload."""
