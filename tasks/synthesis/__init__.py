"""Training environments for a capability: composed or written, then calibrated with the base."""
