"""A format for data that nobody has described: read from a sample, and proposed with what is not certain."""
