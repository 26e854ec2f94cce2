"""The engine core in virtual time: schedulers that serve, and what stands for the rest of vLLM."""
