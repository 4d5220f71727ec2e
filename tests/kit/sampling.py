"""The cases of a slow test that a run takes: some of them, others with each commit."""

import os
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

SEED = "TESTS_SEED"
"""Environment variable: the same one draws the same cases."""


def choose_seed() -> None:
    """Set the seed, also for the processes that share the tests: the commit, unless one is given."""
    if SEED not in os.environ:
        command = ["git", "rev-parse", "--short=12", "HEAD"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent
            )
            commit = done.stdout.strip()
        except OSError:
            commit = ""
        os.environ[SEED] = commit or "none"


def split(items: Sequence[pytest.Item], seed: str) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests to run, and those that others runs take: of ``sampled(n)``, all cases but ``n``.

    Marked on a module, its tests have their cases in common, so that a fixture serves them all.
    """
    cases, most = defaultdict[str, set[str]](set), dict[str, int]()
    found = dict[pytest.Item, tuple[str, str]]()
    for item in items:
        for node, mark in item.iter_markers_with_node("sampled"):
            if callspec := getattr(item, "callspec", None):
                key = item.nodeid.partition("[")[0] if node is item else node.nodeid
                found[item] = key, callspec.id
                cases[key].add(callspec.id)
                most[key] = mark.args[0]
    chosen = {
        key: set(Random(f"{seed} {key}").sample(sorted(each), min(most[key], len(each))))
        for key, each in cases.items()
    }
    left = {item: None for item, (key, case) in found.items() if case not in chosen[key]}
    return [item for item in items if item not in left], list(left)
