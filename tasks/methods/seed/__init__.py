"""One seed of a comparison: its round, every account of episodes, and how what a method made in the end is played."""
