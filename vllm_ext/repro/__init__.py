"""Reproductions: figures and tables of papers, measured again on the simulator.

A module of `vllm_ext.repro.studies` for each, run by ``vllm-ext repro ID``.
"""
