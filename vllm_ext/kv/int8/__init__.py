"""KV that stays on the device in 8 bits: an arena of records behind each layer's blocks, and who moves in and out."""
