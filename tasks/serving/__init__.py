"""What the gateway serves from the registry, and blends of adapters."""
