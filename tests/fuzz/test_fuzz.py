"""Every decoder on inputs near valid ones; the command goes deeper (docs/testing.md)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.inputs import near
from tests.fuzz.targets import CALIBRATION, Target, targets

ROOT = Path(__file__).resolve().parents[2]
TARGETS = targets()
SAMPLED = "request"
"""Run under the coverage-guided fuzzer, too: imports under instrumentation take seconds."""


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_seeds_are_accepted(target: Target) -> None:
    for seed in target.seeds:
        target.run(seed)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_only_documented_errors_come_out(target: Target) -> None:
    @settings(max_examples=120, database=None, suppress_health_check=list(HealthCheck))
    @given(near(tuple(target.seeds)) | st.binary(max_size=200))
    def run(data: bytes) -> None:
        target.run(data)

    run()


def _calibration(**changed: object) -> bytes:
    (question,) = CALIBRATION["questions"]
    return json.dumps(CALIBRATION | {"questions": [question | changed]}).encode()


HEADER = TARGETS["snapshot-header"].seeds[0]
FOUND = [
    ("calibration", b'{"model":"\xff"}'),
    ("calibration", b'{"x":' * 5000),
    ("calibration", _calibration(temperature=0.0)),
    ("calibration", _calibration(scores=[])),
    ("calibration", _calibration(labels=1)),
    ("calibration", _calibration(curves=[{"x": [0.0], "y": [0.5]}])),
    ("calibration", _calibration(curves=[{"x": [], "y": []}] * 2)),
    ("calibration", _calibration(curves=[{"x": [0.0, 1.0], "y": [0.0, 0.0]}] * 2)),
    ("profile", b'{"device":"\xff"}'),
    ("configuration", b"x = " + b"[" * 5000),
    ("text", b"x" * 300),
    ("snapshot-header", HEADER.replace(b"float32", b"float\xff2")),
]


@pytest.mark.parametrize(("name", "data"), FOUND)
def test_what_was_found_once_is_refused(name: str, data: bytes) -> None:
    TARGETS[name].run(data)


def test_the_coverage_guided_fuzzer_finds_nothing_in_a_short_time() -> None:
    pytest.importorskip("atheris", reason="pip install atheris (Linux, CPython 3.11 to 3.13)")
    command = [sys.executable, "-m", "tests.fuzz", "--runs", "2000", "--only", SAMPLED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " ok" in done.stdout
