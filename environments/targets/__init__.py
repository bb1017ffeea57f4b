"""What an agent is improved on: the built-in shop, the public benchmarks, and the catalogue of them all."""
