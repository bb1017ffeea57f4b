"""reasoning-gym as a target: procedural questions with verifiers, by family."""
