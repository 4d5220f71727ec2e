"""`foretick install`: units, a configuration and a place for secrets on a machine with systemd.

The units of systemd/ and the examples of examples/ are data of this package: links here, files in a wheel.
"""
