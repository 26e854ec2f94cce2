"""Kernels: one folder per operation."""
