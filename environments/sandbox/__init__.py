"""Where generated code runs: in confined worker processes, and nowhere else."""
