"""Fetches suites that others wrote from a package registry, and runs them in an environment of their own.

Nothing of them is part of this repository: a source distribution is downloaded once, and its tests unpacked
below `.cache`. Every test of the chosen files runs as it is; which of them fail must be known exactly.
"""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests.kit.archives import unpack
from tests.kit.environments import environment, pip

CACHE = Path(__file__).parents[2] / ".cache" / "others"


@dataclass(frozen=True)
class Suite:
    """Tests in the source distribution of ``package``; ``files`` are run from its directory ``root``.

    ``unpacked``: beginnings of the paths to unpack. ``needs``: what its environment has beside pytest.
    ``options``: of pytest, in place of the suite's own.
    """

    package: str
    version: str
    root: str
    files: tuple[str, ...]
    needs: tuple[str, ...]
    options: tuple[str, ...] = ()
    unpacked: tuple[str, ...] = ("tests/", "pyproject.toml")


def fetched(suite: Suite) -> tuple[Path, Path]:
    """Python of the suite's environment, and the directory to run it from. Skips offline, but not in CI."""
    home = CACHE / f"{suite.package}-{suite.version}"
    python = environment(home / "environment", "pytest", "pytest-asyncio", *suite.needs) / "python"
    done = home / "done"
    if not done.exists():
        only = ("--no-deps", "--no-binary", suite.package, "--dest", str(home))
        pip("download", *only, f"{suite.package}=={suite.version}")
        (packed,) = home.glob("*.tar.gz")
        top = packed.name.removesuffix(".tar.gz")
        unpack(packed, home, tuple(f"{top}/{each}" for each in suite.unpacked))
        (home / top).rename(home / "source")
        packed.unlink()
        done.touch()
    return python, home / "source" / suite.root


async def outcomes(suite: Suite, variables: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Why each test failed, "" for one that did not, by "file::class::test"; and all that was printed.

    Skipped tests are left out.
    """
    python, directory = await asyncio.to_thread(fetched, suite)
    report = CACHE / f"{suite.package}-{os.getpid()}.xml"
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHONPATH"))}
    process = await asyncio.create_subprocess_exec(
        str(python), "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "--tb=short",
        f"--junitxml={report}", *suite.options, *suite.files,
        cwd=directory, env={**own, **variables},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    told, _ = await process.communicate()
    try:
        cases = ElementTree.parse(report).iter("testcase")
        return {_name(case): _failure(case) for case in cases if case.find("skipped") is None}, told.decode()
    except FileNotFoundError:
        raise AssertionError(told.decode()) from None
    finally:
        report.unlink(missing_ok=True)


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname')}::{case.get('name')}"


def _failure(case: ElementTree.Element) -> str:
    for kind in ("failure", "error"):
        found = case.find(kind)
        if found is not None:
            return (found.get("message") or kind).partition("\n")[0]
    return ""
