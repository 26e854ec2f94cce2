"""What was measured, for people and for machines: results, tables, plots, and which sources they come from."""
