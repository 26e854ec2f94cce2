"""How many tokens? One budget rule per file."""
