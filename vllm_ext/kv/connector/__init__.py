"""The connector that vLLM loads: its own, with a say in when KV is copied."""
