"""The table of kinds in docs/quality.md: run `python -m tests.docs.kinds_table` to write it."""

from metrics.feed_faults import ALL_KINDS, FaultKind
from tests.docs.marked_table import MarkedTable

PLACE = MarkedTable("quality.md", "kinds")


def table() -> str:
    """All kinds as a markdown table, in their own order."""
    head = "| kind | rule | actions | flag of answers | counted by |\n|---|---|---|---|---|\n"
    return head + "".join(map(_row, ALL_KINDS))


def _row(kind: FaultKind) -> str:
    actions = ", ".join(f"`{each}`" for each in kind.actions) or kind.outcome
    return f"| `{kind.name}` | {kind.rule} | {actions} | `{kind.flag}` | `{kind.metric}` |\n"


if __name__ == "__main__":
    PLACE.write(table())
