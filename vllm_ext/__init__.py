"""Better scheduling and memory for stock vLLM."""

__version__ = "0.1.0"
