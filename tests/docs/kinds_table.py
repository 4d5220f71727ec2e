"""The table of kinds in docs/quality.md: run `python -m tests.docs.kinds_table` to write it."""

from pathlib import Path

from metrics.feed_faults import ALL_KINDS, FaultKind

PAGE = Path(__file__).parents[2] / "docs" / "quality.md"
BEGIN, END = "<!-- kinds:begin -->\n", "<!-- kinds:end -->\n"


def table() -> str:
    """All kinds as a markdown table, in their own order."""
    head = "| kind | rule | actions | flag of answers | counted by |\n|---|---|---|---|---|\n"
    return head + "".join(map(_row, ALL_KINDS))


def committed() -> str:
    """The table in the page."""
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


def write() -> None:
    """Write the table into the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2], encoding="utf-8")


def _row(kind: FaultKind) -> str:
    actions = ", ".join(f"`{each}`" for each in kind.actions) or kind.outcome
    return f"| `{kind.name}` | {kind.rule} | {actions} | `{kind.flag}` | `{kind.metric}` |\n"


if __name__ == "__main__":
    write()
