"""What a column holds: ids, states, texts, times and compressed blobs."""
