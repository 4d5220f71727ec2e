"""Renders evaluations into `docs/accuracy.md`: run `python -m training.page PAGE FILE...`.

Each file of `foretick evaluate --json` fills the part of the page between `<!-- accuracy:NAME:begin -->` and
`<!-- accuracy:NAME:end -->`, where NAME is the file's stem.
"""

import sys
from pathlib import Path

import msgspec

from training.evaluate import COLUMNS, Report, row


def rendered(report: Report) -> str:
    """The report's tables as markdown, shares in percent."""
    described = ", ".join(f"{key} {value}" for key, value in report.data.items() if key != "ranges")
    parts = [f"Model `{report.model}`, revision `{report.revision}`; {described}.\n"]
    for name, scores in report.settings.items():
        head = f"| {' | '.join(COLUMNS)} |\n|---|{'---:|' * (len(COLUMNS) - 1)}\n"
        rows = "".join(f"| {' | '.join(row(each))} |\n" for each in scores)
        parts.append(f"\n**{name[0].upper() + name[1:]}**\n\n{head}{rows}")
    return "".join(parts)


def marks(name: str) -> tuple[str, str]:
    """What begins and ends the part of an evaluation."""
    return f"<!-- accuracy:{name}:begin -->\n", f"<!-- accuracy:{name}:end -->\n"


def filled(page: str, name: str, report: Report) -> str:
    """The page with this evaluation's part written. Raises ValueError when it has no such part."""
    begin, end = marks(name)
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the page has no {begin.strip()} ... {end.strip()}")
    return before + begin + rendered(report) + end + after


def write(page: Path, files: list[Path]) -> None:
    """Fill the page from all files."""
    text = page.read_text(encoding="utf-8")
    for file in files:
        text = filled(text, file.stem, msgspec.json.decode(file.read_bytes(), type=Report))
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
