"""`python -m bench`: the commands without the daemon's dependencies, for a machine that has only torch."""

from bench.cli import bench

bench()
