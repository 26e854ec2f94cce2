"""Metrics, records, reports: what can be seen from outside."""
