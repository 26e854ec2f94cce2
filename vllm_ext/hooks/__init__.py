"""How hooks into vLLM are made, verified and applied; they lie in `patches`, and are named here as text only."""
