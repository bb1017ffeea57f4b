"""What an agent can be improved on: the contract, the targets, and the synthesized environments."""
