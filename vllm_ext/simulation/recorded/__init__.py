"""Runs of real engines, recorded: repeated to the step, and predicted."""
