"""Where generated code runs: confined worker processes, and nothing else of it anywhere else."""
