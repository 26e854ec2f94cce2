"""KV blocks in 8 bits: the format, its definition in torch, and the fast paths for CPU and GPU.

`format` says what is stored where. `reference` is the definition; `cpu` and `gpu` do the same in one pass over paged
blocks, bit for bit.
"""
