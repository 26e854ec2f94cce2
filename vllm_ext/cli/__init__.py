"""The `vllm-ext` command."""
