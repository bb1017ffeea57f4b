"""What a person reads of a round: figures collected from the store, page, charts, summary."""
