"""Which of several engines serves a request."""
