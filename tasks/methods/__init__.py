"""It compares TRACE with every cheaper way at equal cost: an account of episodes for each method, a file a seed."""
