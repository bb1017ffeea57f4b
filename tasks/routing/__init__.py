"""What decides which adapter answers a task: examples, and the router fitted on them."""
