"""What clients speak to: the query socket, HTTP, and a client."""
