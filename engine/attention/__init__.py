"""Attention over extents: metadata of a batch, and the backends."""
