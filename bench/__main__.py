"""`python -m bench`: the commands without the daemon's dependencies, for machines that only have torch."""

from bench.cli import bench

bench()
