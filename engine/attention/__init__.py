"""Attention over extents: the metadata of a batch, and the backends."""
