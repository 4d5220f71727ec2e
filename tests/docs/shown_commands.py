"""The commands that the pages show, in blocks of `sh`."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), ROOT / "examples/README.md", *ROOT.glob("docs/**/*.md")]
    if "measurements" not in path.parts  # records of what was run at their commits
)
_BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Shown:
    """A command of a page, in one line and without its remark."""

    page: str
    line: str

    @property
    def words(self) -> list[str]:
        """As a shell splits them."""
        return shlex.split(self.line)


def shown(page: Path | None = None) -> Iterator[Shown]:
    """Every command, of one page or of all."""
    for path in [page] if page else PAGES:
        for text in _BLOCK.findall(path.read_text(encoding="utf-8")):
            for line in lines(text):
                yield Shown(str(path.relative_to(ROOT)), line)


def lines(text: str) -> list[str]:
    """The commands of a block: what ends in a backslash goes on."""
    joined = re.sub(r"\\\n\s*", "", text)
    return [re.sub(r"\s+# .*", "", line) for line in joined.splitlines() if line.strip()]


def block(page: str, containing: str) -> list[str]:
    """The commands of the one block of a page that has this text."""
    (found,) = [t for t in _BLOCK.findall((ROOT / page).read_text(encoding="utf-8")) if containing in t]
    return lines(found)
