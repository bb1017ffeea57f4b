"""The Berkeley Function-Calling Leaderboard's multi-turn tasks as targets, from the package bfcl-eval."""
