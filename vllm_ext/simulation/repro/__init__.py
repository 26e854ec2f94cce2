"""Reproductions: figures and tables of papers, measured again on the simulator; one file each in benchmarks/repro."""
