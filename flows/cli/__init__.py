"""The command line trace-agent: one file per group of commands."""
