"""What is looked at of a target before a round plays anything."""
