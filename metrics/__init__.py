"""The daemon's metrics: the catalogue, the store of values, and the exposition."""
