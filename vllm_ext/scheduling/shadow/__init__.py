"""Shadow mode: what another system's order would make of the requests that a server serves."""
