"""How conversations are written for a model: its chat template, tool calls, and the pieces its tokenizer takes."""
