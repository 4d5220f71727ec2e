"""What the daemon measures: the catalogue of metrics, the store that keeps them, and their exposition."""
