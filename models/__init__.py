"""What acts, learns and is served: policies, training, adapters, the registry, the router and the analyst."""
