"""How long a step takes: the runtime model, what it learns while serving, and profiles of engines on disk."""
