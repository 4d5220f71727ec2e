"""Capacity planning: what a device carries of a configuration, by formula and by simulation."""
