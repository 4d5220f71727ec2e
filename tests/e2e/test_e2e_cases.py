"""Files that real feeds deliver, each played by `foretick replay` and held against the bars that are right.

`tests/cases/NAME` has the file, its format, and `expected.csv`, unless the file must be refused.
"""

import csv
from datetime import datetime
from decimal import Decimal
from pathlib import Path

import pytest

from tests.e2e.test_e2e_cli import invoke

CASES = Path(__file__).parent.parent / "cases"
NUMBERS = ("open", "high", "low", "close", "volume")

SAYS = {
    "dst_repeated_hour": "line 7: timestamp_unit: time: 2024-03-10 02:30 does not exist in America/New_York",
    "duplicate_column": "the header (line 1) has two columns 'close'",
    "price_not_positive": "first malformed line: line 3: price: price must be above 0, got -2.3",
    "unbalanced_quote": "first malformed line: line 22: type: a quotation mark is not closed",
    "unfinished_candles": "lines without a record: 3 unfinished candles",
}
"""What the replay says besides, by case."""
MALFORMED = {"dst_repeated_hour": 1, "price_not_positive": 2, "unbalanced_quote": 1}
INCOMPLETE = {
    "dst_repeated_hour": {"2024-11-03T06:50:00.000000000Z", "2024-11-03T07:10:00.000000000Z"},
    "price_not_positive": {"2020-04-20T18:08:00.000000000Z"},
}
"""Openings of the bars that lack a refused record, or stand beside one whose time is not known."""
ANSWERS_LACK = {"dst_repeated_hour", "price_not_positive", "unbalanced_quote"}
"""Cases in which an answer says that its window lacks a record."""


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def bars(found: list[dict[str, str]]) -> list[tuple[str, datetime, *tuple[Decimal, ...]]]:
    return [
        (each["session"], datetime.fromisoformat(each["opens"][:19]), *(Decimal(each[n]) for n in NUMBERS))
        for each in found
    ]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", sorted(each.name for each in CASES.iterdir()))
def test_a_case(name: str, tmp_path: Path) -> None:
    case, made = CASES / name, tmp_path / "bars.csv"
    (data,) = case.glob("input.*")
    done = invoke(
        *("replay", str(data), "--format", str(case / "format.toml"), "--to", "inproc", "--speed", "0"),
        *("--set", "bars.interval=1m", "--bars", str(made)),
    )
    said = done.stdout + done.stderr
    assert SAYS.get(name, "") in said
    expected = case / "expected.csv"
    assert done.exit_code == (0 if expected.exists() else 2), said
    if not expected.exists():
        return
    assert bars(rows(made)) == bars(rows(expected))
    assert f", {MALFORMED.get(name, 0)} malformed lines" in said
    flagged = {each["opens"] for each in rows(made) if "incomplete" in each["flags"].split()}
    assert flagged == INCOMPLETE.get(name, set())
    assert any("incomplete" in line for line in said.splitlines() if "(gap " in line) == (
        name in ANSWERS_LACK
    )
