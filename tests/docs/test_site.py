"""The documentation site: its links and anchors lead somewhere, and it needs no network."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESOURCE = re.compile(r"""<(?:script|img|link)[^>]*(?:src|href)=["'](https?:[^"']*)""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make site` does: a link or an anchor without a target is an error."""
    made = tmp_path_factory.mktemp("site")
    mkdocs = Path(sys.executable).with_name("mkdocs")
    command = [mkdocs, "build", "--quiet", "--config-file", ROOT / "mkdocs.yml", "--site-dir", made]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return made


def test_every_page_is_there_and_can_be_searched(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / f"{page.stem}.html").exists()
        assert f"{page.stem}.html" in index
    assert "Two commands" in (site / "index.html").read_text()


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    loaded = {found for page in site.rglob("*.html") for found in RESOURCE.findall(page.read_text())}
    assert loaded == set()
