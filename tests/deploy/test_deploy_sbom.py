"""The list of what a daemon is made of, compared with the lock."""

import hashlib
import json
import re
import subprocess
import sys
from collections import Counter
from email.message import Message
from pathlib import Path

import pytest

from tests.deploy import sbom
from tests.deploy.sbom import LOCK, ROOT, Licence, document, licence_of, locked

TEXT = LOCK.read_text()
PINNED = re.findall(r"^([\w.-]+)==([\w.+!-]+)", TEXT, re.M)
"""Names and versions, read in another way than the program reads them."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of both files, written as a developer would."""
    folder = tmp_path_factory.mktemp("sbom")
    subprocess.run(
        [sys.executable, "-m", "tests.deploy.sbom", folder], cwd=ROOT, check=True, capture_output=True
    )
    return folder


def test_every_pinned_package_is_there_once_with_all_its_hashes(written: Path) -> None:
    components = json.loads((written / "foretick.cdx.json").read_text())["components"]
    chart = components.pop()
    file = sbom.LIVE / "uPlot.iife.min.js"
    assert (chart["name"], chart["licenses"]) == ("uplot", [{"expression": "MIT"}])
    assert f"uPlot (v{chart['version']})" in file.read_text()
    assert chart["hashes"][0]["content"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert "MIT" in (sbom.LIVE / "uPlot.LICENSE").read_text()
    assert Counter((each["name"], each["version"]) for each in components) == Counter(PINNED)
    blocks = re.split(r"^(?=[\w.-]+==)", TEXT, flags=re.M)[1:]
    hashes = [re.findall(r"--hash=sha256:([0-9a-f]{64})\b", block) for block in blocks]
    assert all(hashes)
    assert [[each["content"] for each in component["hashes"]] for component in components] == hashes
    assert {each["alg"] for component in components for each in component["hashes"]} == {"SHA-256"}


def test_it_is_a_document_of_this_version_whose_references_exist(written: Path) -> None:
    found = json.loads((written / "foretick.cdx.json").read_text())
    assert (found["bomFormat"], found["specVersion"], found["version"]) == ("CycloneDX", "1.6", 1)
    assert re.fullmatch(
        r"urn:uuid:[0-9a-f]{8}-[0-9a-f]{4}-5[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", found["serialNumber"]
    )
    own = found["metadata"]["component"]
    assert (own["name"], own["licenses"]) == ("foretick", [{"expression": "Apache-2.0"}])
    references = [each["bom-ref"] for each in (own, *found["components"])]
    assert len(set(references)) == len(references)
    (edges,) = found["dependencies"]
    assert [edges["ref"], *edges["dependsOn"]] == references


def test_it_is_the_same_for_the_same_lock_and_another_one_for_another() -> None:
    assert document(TEXT) == document(TEXT)
    assert document(TEXT)["serialNumber"] != document(TEXT.replace("==0", "==1", 1))["serialNumber"]


def test_markers_are_kept() -> None:
    text = (
        "one==1.0 ; sys_platform == 'win32' \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\ntwo==2!2.0\n"
    )
    one, two = locked(text)
    assert (one.marker, one.hashes) == ('sys_platform == "win32"', ("aa", "bb"))
    assert (two.version, two.marker, two.hashes) == ("2!2.0", "", ())


def test_licences_are_those_of_the_installed_packages(written: Path) -> None:
    assert licence_of("click") == Licence(expression="BSD-3-Clause")
    assert licence_of("no-such-package") == Licence()
    assert str(Licence()) == "not known"
    rows = (written / "licences.md").read_text().splitlines()[2:]
    assert [tuple(row.split(" | ")[:2]) for row in rows] == [
        (f"| {name}", version) for name, version in [*PINNED, ("uplot", sbom.vendored()[0].version)]
    ]
    assert next(row for row in rows if row.startswith("| click |")).split(" | ")[2] == "BSD-3-Clause"


def test_a_licence_without_an_expression_has_the_name_that_the_metadata_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    about = Message()
    about["License"] = "The whole text\nof a licence"
    monkeypatch.setattr(sbom, "metadata", lambda _: about)
    assert licence_of("any") == Licence()
    about["Classifier"] = "License :: OSI Approved :: BSD License"
    assert licence_of("any") == Licence(name="BSD License")
