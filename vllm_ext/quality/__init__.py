"""What keeping KV in fewer bits does to a model's answers, and whether that is within the project's own limit."""
