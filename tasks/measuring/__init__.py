"""How good a policy is: evaluation of any policy on any target, and the statistics of it."""
