"""vLLM's attention backend ``CUSTOM``: the platform's own kernel or ours, over blocks as they are or in INT8."""
