"""Benchmarks: every figure a ratio to a named reference measured in the same run."""
