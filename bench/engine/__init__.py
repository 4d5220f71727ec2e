"""`foretick bench engine`."""
