"""Compiles what a fresh checkout has not compiled yet, and measures how layers run, once and alone.

Else all test processes do at the same time.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as for tests, before PyTorch reads it

from daemon.config.schema import UNTRAINED, Config, ModelConfig
from daemon.engine.build import load_on_cpu
from feeds import columns
from feeds.quality import silence
from ingest import warm_up

if __name__ == "__main__":
    warm_up()
    columns.warm_up()
    silence.warm_up()
    for model in (ModelConfig(), ModelConfig(path=UNTRAINED)):
        load_on_cpu(Config(model=model))
