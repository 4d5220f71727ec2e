"""`foretick bench scheduler`."""
