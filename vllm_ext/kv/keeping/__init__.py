"""What is kept: whose a chunk is, what it is worth, and how long it stays."""
