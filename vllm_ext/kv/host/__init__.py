"""KV in host memory: its books, its copies and their formats."""
