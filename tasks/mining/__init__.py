"""What the agent lacks: analysts, labelling, agreement and selection."""
