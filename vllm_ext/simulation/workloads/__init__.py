"""Workloads: whose requests arrive when, with which lengths, and who asks again."""
