"""Measures a device and a model: the time of passes, and what the layers do."""
