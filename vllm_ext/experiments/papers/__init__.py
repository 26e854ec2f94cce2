"""The reproductions, one module each, and modules named after a system that hold what its reproductions share."""
