"""Conversations: who they are, what they keep, and how an operator sees them."""
