"""Renders evaluations into `docs/accuracy.md`: run `python -m training.page PAGE FILE...`.

Each file of `foretick evaluate --json` fills the part of the page between `<!-- accuracy:NAME:begin -->` and
`<!-- accuracy:NAME:end -->`, where NAME is the file's stem. Those of a directory stand beside one another.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from training.evaluate import COLUMNS, QuestionScores, Report, row


def described(report: Report) -> str:
    """Which model was asked about which tape."""
    data = ", ".join(f"{key} {value}" for key, value in report.data.items() if key != "ranges")
    return f"Model `{report.model}`, revision `{report.revision}`; {data}.\n"


def compared(reports: Sequence[Report]) -> str:
    """Balanced accuracy on other lines, with its interval, as markdown; majority and simple of the first."""
    columns = [{each.question: each for each in next(iter(one.settings.values()))} for one in reports]
    heads = ("question", "labels", "majority", "simple", *(each.lines for each in reports))
    lines = [described(reports[0]), f"\n| {' | '.join(heads)} |\n|---|{'---:|' * (len(heads) - 1)}\n"]
    for question, first in columns[0].items():
        known = [
            f"{100 * each:.1f}" if each is not None else ""
            for each in (first.majority, first.simple_balanced)
        ]
        shown = [_balanced(column[question]) for column in columns]
        lines.append(f"| {' | '.join((question, str(first.accuracy.answers), *known, *shown))} |\n")
    return "".join(lines)


def _balanced(scores: QuestionScores) -> str:
    found = scores.balanced
    return f"{100 * found.share:.0f} ({100 * found.low:.0f}..{100 * found.high:.0f})"


def rendered(report: Report) -> str:
    """The report's tables as markdown, shares in percent."""
    parts = [described(report)]
    for name, scores in report.settings.items():
        head = f"| {' | '.join(COLUMNS)} |\n|---|{'---:|' * (len(COLUMNS) - 1)}\n"
        rows = "".join(f"| {' | '.join(row(each))} |\n" for each in scores)
        parts.append(f"\n**{name[0].upper() + name[1:]}**\n\n{head}{rows}")
    return "".join(parts)


def marks(name: str) -> tuple[str, str]:
    """What begins and ends the part of an evaluation."""
    return f"<!-- accuracy:{name}:begin -->\n", f"<!-- accuracy:{name}:end -->\n"


def filled(page: str, name: str, text: str) -> str:
    """The page with this part written. Raises ValueError when it has no such part."""
    begin, end = marks(name)
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the page has no {begin.strip()} ... {end.strip()}")
    return before + begin + text + end + after


def write(page: Path, files: list[Path]) -> None:
    """Fill the page from all files and directories."""
    text = page.read_text(encoding="utf-8")
    for file in files:
        reports = [_read(each) for each in sorted(file.iterdir())] if file.is_dir() else []
        text = filled(text, file.stem, compared(reports) if reports else rendered(_read(file)))
    page.write_text(text, encoding="utf-8")


def _read(file: Path) -> Report:
    return msgspec.json.decode(file.read_bytes(), type=Report)


if __name__ == "__main__":
    write(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
