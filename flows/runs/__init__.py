"""What flow runs have to know of one another: who is at work on a target, who died, and which nights were missed."""
