"""`vllm-ext demo`: what it asks of the server, how it asks, and how it shows the answers."""
