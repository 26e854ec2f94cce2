"""KV blocks as they are, between the pages of all layers and buffers of whole chunks: `gpu`, in one launch."""
