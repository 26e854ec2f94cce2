"""Comparison of length predictors on prompts whose output lengths are known."""
