"""What an engine tells of its load: to routers, at ``/vllm-ext/load``, and as gauges."""
