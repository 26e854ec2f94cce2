"""Prometheus metrics and the log of finished requests: what can be seen of a server from outside."""
