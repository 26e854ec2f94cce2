"""KV on disk behind the host tier: a folder of chunks, its index, and the tier that vLLM sees."""
