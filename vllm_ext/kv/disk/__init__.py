"""KV on disk behind the host tier: vLLM's tier of files, with a limit, an order of use, checksums and an identity."""
