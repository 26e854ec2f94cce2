"""Forecasts a scheduler can act on: output length and run time."""
