"""Formats, as TOML."""
