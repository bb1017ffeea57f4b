"""What lets a round run without anybody looking: limits, a watch for hangs, and notices to people."""
