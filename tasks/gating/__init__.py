"""The gate's rules applied to a round, for every stage that asks for them: levels, looks at a split, the decision."""
