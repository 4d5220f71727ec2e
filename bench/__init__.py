"""Benchmarks: every figure next to a reference measured in the same run."""
