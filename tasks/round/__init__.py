"""What every stage stands on: the open round, retries, playing and storing, progress, preflight, traffic."""
