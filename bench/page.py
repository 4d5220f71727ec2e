"""Measured tables inside a written page: they stand between two markers, and nothing else is touched."""

from __future__ import annotations

from pathlib import Path


def markers(section: str) -> tuple[str, str]:
    """The two lines between which the tables of ``section`` stand."""
    return f"<!-- {section}: begin -->", f"<!-- {section}: end -->"


def put_into(page: Path, section: str, tables: str) -> None:
    """Replace what stands between the page's markers of ``section``. Raises ValueError when it has none."""
    page.write_text(replaced(page.read_text(encoding="utf-8"), section, tables), encoding="utf-8")


def replaced(text: str, section: str, tables: str) -> str:
    """``text`` with ``tables`` between its markers. Raises ValueError unless each occurs once, in order."""
    opening, closing = markers(section)
    before, begin, rest = text.partition(opening)
    _, end, after = rest.partition(closing)
    if not begin or not end or opening in after or closing in after:
        raise ValueError(f"the page needs one {opening} and one {closing} after it")
    return f"{before}{opening}\n\n{tables}\n{closing}{after}"
