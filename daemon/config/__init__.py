"""The configuration: schema, loading, checks, and the reference page."""
