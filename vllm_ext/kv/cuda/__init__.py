"""The tier on CUDA devices: copies, their streams, and 8 bits on the way."""
