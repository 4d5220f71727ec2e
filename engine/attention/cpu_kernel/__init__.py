"""Flash attention on the CPU: one compiled call a layer, over extents in place."""
