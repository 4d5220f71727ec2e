"""A plug-in for Foretick."""
