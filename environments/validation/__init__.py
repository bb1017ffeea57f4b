"""What a synthesized environment must pass before it may train anything."""
