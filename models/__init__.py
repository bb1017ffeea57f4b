"""What acts, learns and is served: policies, training, adapters, the registry, the router and the analyst."""

from models.own_modules import own_first

own_first()
