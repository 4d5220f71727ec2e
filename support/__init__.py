"""Helpers under everything: files, directories, compiled functions."""
