"""The table of docs/questions.md: run `python -m tests.tapes.questions_table` to write it."""

from pathlib import Path

from flash.question import EXACT_VALUE
from tapes.rules import RULES

PAGE = Path(__file__).parents[2] / "docs" / "questions.md"
BEGIN, END = "<!-- questions:begin -->\n", "<!-- questions:end -->\n"


def table() -> str:
    """All questions as a markdown table, in the order of their tokens."""
    columns = (
        "question | asked as | choices | the first is right where | undefined where | bars | distance in"
    )
    head = f"| {columns} |\n|---|---|---|---|---|---|---|\n"
    rows = [
        f"| `{rule.name}` | {rule.text} | {', '.join(rule.choices)} | {rule.means} "
        f"| {rule.undefined or 'never'} | {rule.bars} | {rule.unit} |\n"
        for rule in RULES
    ]
    exact = f"| `{EXACT_VALUE.name}` | {EXACT_VALUE.text} | a number | it is the last close | never | 1 | |\n"
    return head + "".join(rows) + exact


def committed() -> str:
    """The table in the page."""
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


def write() -> None:
    """Write the table into the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    write()
