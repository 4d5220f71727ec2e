"""Measures a device and fits its cost model."""
