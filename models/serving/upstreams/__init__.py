"""What answers behind the gateway: vLLM servers and the model in this process."""
