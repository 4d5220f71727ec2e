"""Measurements of the interfaces to clients."""
