"""What a person who operates rounds has: the plan of a round, what is told of it, and the daily watch."""
