"""The table of metrics in docs/operations.md: run `python -m tests.docs.metrics_table` to write it."""

from metrics.catalogue import METRICS, Metric
from tests.docs.marked_table import MarkedTable

PLACE = MarkedTable("operations.md", "metrics")


def table() -> str:
    """The catalogue as a markdown table, in its own order."""
    head = "| metric | kind | labels | meaning |\n|---|---|---|---|\n"
    return head + "".join(map(_row, METRICS))


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
    PLACE.write(table())
