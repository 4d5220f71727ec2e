"""`foretick bench stream`."""
