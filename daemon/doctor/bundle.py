"""A support bundle: what `foretick doctor` saw and the configuration, without secrets, in one archive."""

import io
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import msgspec

from daemon.config.schema import Config
from daemon.doctor.diagnosis import Diagnosis
from daemon.doctor.examination import Facts
from daemon.doctor.redaction import Redactor

ENVIRONMENT = (
    *("LANG", "TZ", "SCHEDULER_TYPE", "FORETICK_CACHE", "STATE_DIRECTORY", "CACHE_DIRECTORY"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "PYTHONUNBUFFERED", "INVOCATION_ID"),
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"),
)
"""Variables whose values may be shown."""


def members_of(
    facts: Facts, diagnoses: Sequence[Diagnosis], config: Config, environment: Mapping[str, str]
) -> dict[str, str]:
    """The bundle's files by name, without secrets."""
    redactor = Redactor.of(config)
    packages = {each.metadata["Name"]: each.version for each in distributions()}
    values: dict[str, Any] = {
        "findings.json": [asdict(each) for each in diagnoses],
        "configuration.json": msgspec.to_builtins(config, enc_hook=str),
        "machine.json": asdict(facts.machine),
        "packages.json": dict(sorted(packages.items())),
        "environment.json": {name: environment[name] for name in ENVIRONMENT if name in environment},
        "sessions.json": msgspec.to_builtins(facts.daemon.sessions),
    }
    texts = {"metrics.txt": facts.daemon.exposition, "log.txt": "\n".join(facts.log or ())}
    written = {name: json.dumps(redactor.clean(value), indent=1) for name, value in values.items()}
    return written | {name: redactor.clean(text) for name, text in texts.items() if text}


def write_bundle(path: Path, members: Mapping[str, str]) -> None:
    """Write a new archive that only its owner may read. Raises OSError rather than overwrite."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(packed.getvalue())
