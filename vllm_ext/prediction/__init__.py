"""Forecasts of output length that a scheduler can act on."""
