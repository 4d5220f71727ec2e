"""A table that a program writes into a page, between two marks."""

from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


@dataclass(frozen=True)
class MarkedTable:
    """``name``: in the marks, ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``."""

    page: str
    name: str

    def committed(self) -> str:
        """The table in the page."""
        return self._parts()[1]

    def write(self, table: str) -> None:
        """Write the table into the page."""
        before, _, rest = self._parts()
        (DOCS / self.page).write_text(before + table + rest, encoding="utf-8")

    def _parts(self) -> tuple[str, str, str]:
        """The page up to the table, the table, and the rest."""
        text = (DOCS / self.page).read_text(encoding="utf-8")
        begin, end = f"<!-- {self.name}:begin -->\n", f"<!-- {self.name}:end -->\n"
        before, mark, behind = text.partition(begin)
        table, last, rest = behind.partition(end)
        return before + mark, table, last + rest
