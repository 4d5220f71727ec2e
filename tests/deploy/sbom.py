"""What a daemon is made of: `python -m tests.deploy.sbom FOLDER` writes foretick.cdx.json and licences.md.

The first is a CycloneDX document: each package that requirements.lock pins, with its hashes and its licence.
The second lists the licences. Both are the same for the same lock and the same packages installed.
"""

import hashlib
import json
import re
import sys
import tomllib
import uuid
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements.lock"
LIVE = ROOT / "daemon" / "api" / "live"
_UPLOT = re.compile(rb"uPlot \(v([0-9.]+)\)")
_CLASSIFIER = "License :: OSI Approved :: "
_LONGEST_NAME = 60
"""A field longer than this is the text of a licence, not its name."""


@dataclass(frozen=True)
class Package:
    """A line of the lock, or a file of the tree that is another's, with its ``licence``.

    ``marker``: where it is installed; ``hashes``: SHA-256 of its files.
    """

    name: str
    version: str
    marker: str
    hashes: tuple[str, ...]
    registry: str = "pypi"
    licence: str = ""

    @property
    def url(self) -> str:
        """Its package URL, by which other tools know it."""
        return f"pkg:{self.registry}/{self.name}@{self.version}"


@dataclass(frozen=True)
class Licence:
    """``expression``: of SPDX's identifiers; else ``name`` as the package has it; both "" if nothing says."""

    expression: str = ""
    name: str = ""

    def __str__(self) -> str:
        return self.expression or self.name or "not known"


def locked(text: str) -> list[Package]:
    """The packages of a lock file, in its order."""
    return [_package(line) for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def _package(line: str) -> Package:
    requirement, *hashes = line.split("--hash=sha256:")
    parsed = Requirement(requirement.strip())
    (version,) = parsed.specifier
    return Package(
        parsed.name, version.version, str(parsed.marker or ""), tuple(each.strip() for each in hashes)
    )


def vendored() -> list[Package]:
    """What the live page has of others, by the version and the bytes of the file itself."""
    chart = (LIVE / "uPlot.iife.min.js").read_bytes()
    (version,) = _UPLOT.findall(chart)
    return [Package("uplot", version.decode(), "", (hashlib.sha256(chart).hexdigest(),), "npm", "MIT")]


def licence_of(name: str) -> Licence:
    """By the metadata of the package that is installed."""
    try:
        about = metadata(name)
    except PackageNotFoundError:
        return Licence()
    if expression := about.get("License-Expression"):
        return Licence(expression=expression)
    classifiers = about.get_all("Classifier") or []
    named = [each.removeprefix(_CLASSIFIER) for each in classifiers if each.startswith(_CLASSIFIER)]
    text = (about.get("License") or "").strip()
    short = text if len(text) <= _LONGEST_NAME and "\n" not in text else ""
    return Licence(name=" AND ".join(named) or short)


def _licence(package: Package) -> Licence:
    return Licence(expression=package.licence) if package.licence else licence_of(package.name)


def document(text: str) -> dict[str, Any]:
    """The CycloneDX document of a lock file's text."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    own = Package(project["name"], project["version"], "", ())
    packages = [*locked(text), *vendored()]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, own.url + text)}",
        "version": 1,
        "metadata": {"component": _component(own, "application", Licence(expression=project["license"]))},
        "components": [_component(each, "library", _licence(each)) for each in packages],
        "dependencies": [{"ref": own.url, "dependsOn": [each.url for each in packages]}],
    }


def _component(package: Package, kind: str, licence: Licence) -> dict[str, Any]:
    component: dict[str, Any] = {
        "type": kind,
        "bom-ref": package.url,
        "name": package.name,
        "version": package.version,
        "purl": package.url,
    }
    if package.hashes:
        component["hashes"] = [{"alg": "SHA-256", "content": each} for each in package.hashes]
    if licence.expression:
        component["licenses"] = [{"expression": licence.expression}]
    elif licence.name:
        component["licenses"] = [{"license": {"name": licence.name}}]
    if package.marker:
        component["properties"] = [{"name": "foretick:marker", "value": package.marker}]
    return component


def licences(text: str) -> str:
    """A table of packages and licences."""
    rows = (
        f"| {each.name} | {each.version} | {_licence(each)} | {each.marker or 'everywhere'} |\n"
        for each in (*locked(text), *vendored())
    )
    return "| package | version | licence | where |\n|---|---|---|---|\n" + "".join(rows)


def main(folder: Path) -> None:
    """Write both files."""
    text = LOCK.read_text(encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    written = json.dumps(document(text), indent=2) + "\n"
    (folder / "foretick.cdx.json").write_text(written, encoding="utf-8")
    (folder / "licences.md").write_text(licences(text), encoding="utf-8")
    unknown = [each.name for each in locked(text) if licence_of(each.name) == Licence()]
    print(f"written: {folder}/foretick.cdx.json, {folder}/licences.md")
    print(f"no licence in the metadata here: {', '.join(unknown) or 'none'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
