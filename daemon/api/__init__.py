"""The daemon's interfaces to clients: the query socket, HTTP, and a Python client."""
