"""What decides which adapter answers a task: examples, the router fitted on them, and the candidate behind it."""
