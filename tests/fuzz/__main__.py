"""`python -m tests.fuzz --seconds N`: every target under a coverage-guided fuzzer, in a process of its own.

The corpus is kept below `.cache/fuzz`, so that the next run goes on from it. Exit status 1: a finding, whose
input is kept there, too; ``--target NAME --input FILE`` runs it again. Memory and the time of one input are
bounded: more than that is a finding.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "fuzz"
MEMORY_MB = 2048
ALLOCATION_MB = 256
INPUT_S = 10
LONGEST = 8192
"""Bytes of an input."""
PACKAGES = ["feeds", "daemon", "flash", "regions", "scheduler"]
_COMPILED = "decode_kernel json_scanner msgpack_scanner places protobuf_scanner text_kernel"
COMPILED = [f"feeds.columns.{name}" for name in _COMPILED.split()]
COMPILED += ["feeds.quality.silence"]
"""By Numba, whose code has no coverage."""
_STATUS = re.compile(r"#(\d+)\s+\w+\s+cov: (\d+) ft: (\d+)")


def fuzz(name: str, arguments: Sequence[str]) -> None:
    """Fuzz one target in this process, by libFuzzer's arguments. Does not return."""
    import atheris

    with atheris.instrument_imports(PACKAGES, COMPILED, enable_loader_override=False):
        from tests.fuzz.targets import targets
    target = targets()[name]
    folder = CACHE / name
    folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds):
        (folder / f"seed{number}").write_bytes(seed)

    def run(data: bytes) -> None:
        target.run(data)

    atheris.Setup([sys.argv[0], *arguments, str(folder)], run)
    atheris.Fuzz()


def report(name: str, seconds: float, runs: int) -> bool:
    """Fuzz one target in a process of its own and print a line; False: a finding."""
    limits = [f"-rss_limit_mb={MEMORY_MB}", f"-malloc_limit_mb={ALLOCATION_MB}", f"-timeout={INPUT_S}"]
    bound = [f"-runs={runs}"] if runs else [f"-max_total_time={max(1, round(seconds))}"]
    crashes = CACHE / "findings"
    crashes.mkdir(parents=True, exist_ok=True)
    prefix = f"-artifact_prefix={crashes}/{name}-"
    command = [sys.executable, "-m", "tests.fuzz", "--target", name, "--", *limits, *bound, prefix]
    began = time.monotonic()
    done = subprocess.run(
        [*command, f"-max_len={LONGEST}", "-print_final_stats=1"],
        capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    took = time.monotonic() - began
    found = _STATUS.findall(done.stderr)
    executions, coverage, features = map(int, found[-1]) if found else (0, 0, 0)
    peak = re.search(r"peak_rss_mb:\s*(\d+)", done.stderr)
    state = "ok" if done.returncode == 0 else "FINDING"
    print(
        f"{name:24} {took:6.0f} s {executions:9} inputs {coverage:6} edges {features:6} features "
        f"{peak[1] if peak else '?':>5} MiB  {state}",
        flush=True,
    )
    if done.returncode:
        print(done.stdout[-3000:], done.stderr[-3000:], sep="\n", flush=True)
    return done.returncode == 0


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="for all targets together")
    parser.add_argument("--runs", type=int, default=0, help="inputs of each target, instead of a time")
    parser.add_argument("--only", help="targets whose name has this")
    parser.add_argument("--target", help="one target, in this process; libFuzzer's arguments follow --")
    parser.add_argument("--input", type=Path, help="run one input of --target")
    parser.add_argument("rest", nargs="*")
    options = parser.parse_args()
    if options.target and not options.input:
        fuzz(options.target, options.rest)
        return 0
    from tests.fuzz.targets import targets

    found = targets()
    if options.input:
        found[options.target].run(options.input.read_bytes())
        return 0
    names = [name for name in found if options.only is None or options.only in name]
    share = options.seconds / len(names)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    findings = [name for name in names if not report(name, share, options.runs)]
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
