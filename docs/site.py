"""Hooks of the documentation site: pages from outside docs/, and links to files that are no page."""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {
    "index.md": "README.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
    "examples/README.md": "examples/README.md",
}
"""Pages of the site by their places in it, and where they are in the repository."""
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside."""
    for place, source in OUTSIDE.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links of the repository become links of the site; one to a file that is no page becomes its text."""
    place = page.file.src_uri
    home = posixpath.dirname(OUTSIDE.get(place, f"docs/{place}"))

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        if ":" in target:
            return found[0]
        path = posixpath.normpath(posixpath.join(home, target))
        there = next((site for site, source in OUTSIDE.items() if source == path), path.removeprefix("docs/"))
        if files.get_file_from_path(there) is None:
            return text
        return f"[{text}]({posixpath.relpath(there, posixpath.dirname(place) or '.')}{anchor})"

    return _LINK.sub(link, markdown)
