"""Compiles what a fresh checkout has not compiled yet, once: else all test processes do at the same time."""

from __future__ import annotations

from daemon.config.schema import Config
from daemon.engine.build import load_on_cpu
from feeds import columns
from ingest import warm_up

if __name__ == "__main__":
    warm_up()
    columns.warm_up()
    load_on_cpu(Config())
