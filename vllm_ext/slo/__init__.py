"""Service-level objectives of clients: what became of them, and who is turned away in time."""
