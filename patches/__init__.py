"""Hooks into vLLM, one file each, verified against named versions; nothing here is imported or applied by itself."""
