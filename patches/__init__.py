"""Hooks into vLLM, one file each, verified against named versions."""
