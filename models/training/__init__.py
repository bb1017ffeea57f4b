"""Learning: GRPO on a LoRA adapter with TRL, its forward pass, its records, and who samples for it."""
