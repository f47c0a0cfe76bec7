"""Whole training jobs inside tests and benchmarks."""
