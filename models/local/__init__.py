"""The model in this process: loading, sampling many episodes at once, attention and caches."""
