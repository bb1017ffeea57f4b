"""LoRA adapters as files and deltas: reading, checking, blending, proving alive, and the registry of versions."""
