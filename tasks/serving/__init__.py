"""What the gateway serves of a home, and blends of adapters."""
