"""Many runs: grids of settings and searches for capacity, resumable, over processes or a Ray cluster."""
