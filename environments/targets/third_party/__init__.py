"""What the public benchmarks share as targets: splits by hash, missing packages told, and the users they simulate."""
