"""The endpoint itself: the application, conversations, metrics, page and traffic log."""
