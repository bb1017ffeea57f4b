"""The Berkeley Function-Calling Leaderboard as targets: conversations here, questions with one answer in `single/`."""
