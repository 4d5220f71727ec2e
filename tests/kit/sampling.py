"""The part of slow tests that a run takes: some of their cases or of them, others with each commit."""

import os
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
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
    """The tests to run, and those that other runs take.

    Of ``sampled(n)``, all cases but ``n`` are left. Marked on a module, its tests have their cases in common,
    so that a fixture serves them all. Of ``rotated(n, name)``, all tests or modules of that name but ``n``
    are left, with all their cases.
    """
    drawn, most = defaultdict[str, set[str]](set), dict[str, int]()
    found = {item: list(_draws(item)) for item in items}
    for key, case, count in (draw for draws in found.values() for draw in draws):
        drawn[key].add(case)
        most[key] = count
    chosen = {
        key: set(Random(f"{seed} {key}").sample(sorted(each), min(most[key], len(each))))
        for key, each in drawn.items()
    }
    left = {
        item: None for item, draws in found.items() if any(case not in chosen[key] for key, case, _ in draws)
    }
    return [item for item in items if item not in left], list(left)


def _draws(item: pytest.Item) -> Iterator[tuple[str, str, int]]:
    """What is drawn from, which of it the item belongs to, and how many are drawn."""
    test = item.nodeid.partition("[")[0]
    for node, mark in item.iter_markers_with_node("sampled"):
        if callspec := getattr(item, "callspec", None):
            yield test if node is item else node.nodeid, callspec.id, mark.args[0]
    for node, mark in item.iter_markers_with_node("rotated"):
        most, name = mark.args
        yield f"rotated {name}", test if node is item else node.nodeid, most
