"""What lets a round run without anybody looking: limits, a watch for hangs, who is alive, progress, and notices."""
