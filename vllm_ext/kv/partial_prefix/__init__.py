"""Conversations whose KV has gaps: what is kept behind them, which of it is used, and how workers compute the rest."""
