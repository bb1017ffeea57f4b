"""Which adapter answers a task: retrieval or label probabilities on the first observation."""
