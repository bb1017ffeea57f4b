"""The stages of a round as retryable Prefect tasks: ids in, ids out."""
