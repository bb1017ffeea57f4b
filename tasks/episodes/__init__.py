"""A round's episodes for people to read: chosen, cut to size, side by side on pages, and as traces in MLflow."""
