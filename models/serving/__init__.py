"""What was learnt behind one OpenAI-compatible endpoint."""
