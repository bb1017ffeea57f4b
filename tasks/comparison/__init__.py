"""It keeps the figures of a comparison of methods, a file a seed, and draws table and page from the files alone."""
