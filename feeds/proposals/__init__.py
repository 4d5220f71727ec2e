"""A format for data without a description: read from a sample, and proposed with what is not certain."""
