"""Kustomize for tests, which Go builds once from its module; Debian 12's own Go can build this version."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kit.programs import need

VERSION = "v5.0.3"
FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "kustomize" / VERSION


def rendered(overlay: Path) -> list[dict[str, Any]]:
    """The resources that an overlay makes, as a cluster would get them."""
    command = [_program(), "build", overlay]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return list(yaml.safe_load_all(done.stdout))


def _program() -> Path:
    program = FOLDER / "kustomize"
    if not program.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [need("go"), "install", f"sigs.k8s.io/kustomize/kustomize/v5@{VERSION}"],
            env=os.environ | {"GOBIN": str(FOLDER), "GOFLAGS": "-mod=mod"},
            cwd=FOLDER,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        if done.returncode:
            # also in CI: a registry that is away says nothing about the manifests
            pytest.skip(f"Go could not build Kustomize: {done.stderr[-800:]}")
    return program
