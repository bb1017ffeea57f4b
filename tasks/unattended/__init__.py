"""What lets a round run without anybody looking: limits, a watch for hangs, who and what is alive, and notices."""
