"""Reproductions: figures and tables of papers, measured again on the simulator.

The modules of `vllm_ext.experiments.papers` are named by paper; a figure is run by ``vllm-ext repro ID``.
"""
