"""What every stage stands on: the open round and its tasks, retries, playing and storing, preflight, traffic."""
