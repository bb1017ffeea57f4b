"""Written environments for the shop, the yardstick of `benchmarks.written`. The writing model is not shown them."""
