"""Keeping a home: copies that can be put back anywhere, a check of everything around it, and what may be removed."""
