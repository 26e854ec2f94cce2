"""Exit statuses that all commands share: 0 yes or done, 1 no, 2 usage, 3 failed or incomplete."""

FAILED = 3
"""It failed, or left something out."""
