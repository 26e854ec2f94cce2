"""Steering of vLLM's scheduler: views handed to policies, plans they return, and the scheduler that applies them."""
