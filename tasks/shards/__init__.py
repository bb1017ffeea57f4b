"""Several processes play what a stage owes: shards in the database, and where they are worked on."""
