"""KV that comes back within a step, and the choice between that, a load between steps, and computing."""
