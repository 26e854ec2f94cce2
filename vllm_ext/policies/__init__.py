"""Policies: one paper's idea per file. Pure: no vLLM, no torch, no clock; time is an argument."""
