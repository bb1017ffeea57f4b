"""It makes methods compete at equal cost: what each makes, and the one account of episodes that each pays from."""
