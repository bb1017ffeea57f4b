"""OpenAI's protocol: requests, errors, and reading a model's turn into tool calls."""
