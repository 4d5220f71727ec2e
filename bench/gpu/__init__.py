"""`foretick bench gpu`."""
