"""The table of metrics in docs/operations.md: run `python -m tests.docs.metrics_table` to write it."""

from pathlib import Path

from metrics.catalogue import METRICS, Metric

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
BEGIN, END = "<!-- metrics:begin -->\n", "<!-- metrics:end -->\n"


def table() -> str:
    """The catalogue as a markdown table, in its own order."""
    head = "| metric | kind | labels | meaning |\n|---|---|---|---|\n"
    return head + "".join(map(_row, METRICS))


def committed() -> str:
    """The table in the page."""
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


def write() -> None:
    """Write the table into the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2], encoding="utf-8")


def _row(metric: Metric) -> str:
    labels = "; ".join(_label(metric, label) for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |\n"


def _label(metric: Metric, label: str) -> str:
    values = metric.values.get(label)
    # stages have their own table
    if not values or label == "stage":
        return f"`{label}`"
    return f"`{label}`: {', '.join(values)}"


if __name__ == "__main__":
    write()
