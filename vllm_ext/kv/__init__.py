"""KV in two tiers: on the device, and in host memory, on a subclass of vLLM's OffloadingConnector.

`connector` is what vLLM loads; `spec` says how large the tier is; `manager` knows what is in it; `worker` copies, with
a `codec` that keeps KV as it is or in 8 bits; `layout` finds out where a backend puts each value of a page.
"""
