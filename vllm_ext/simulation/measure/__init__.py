"""What a run leaves behind, and the metrics, tables and traces that are made of it."""
