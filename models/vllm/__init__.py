"""vLLM servers: the client of one, and the policy over several."""
