"""What to change on a vLLM that serves this trace on this hardware: a search, and the evidence for its answer."""
