"""Whose KV lives where? One residency rule per file."""
