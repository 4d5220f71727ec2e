"""Tables show what was measured, and the committed page is the committed measurement."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.cli import bench
from bench.figures import Latency, Rates
from bench.hits import Condition, Hits
from bench.machine import Machine
from bench.page import markers, put_into
from bench.report import Report, render
from bench.ring_rate import RingRate
from bench.saved import tables_of

BEGIN, END = markers("results")
DOCS = Path(__file__).parents[2] / "docs"
MACHINE = Machine("a processor", 2, 0.5, "3.11", {"torch": "2"})
FAST, SLOW = Latency(10, 0.5, 0.9, 1.0), Latency(10, 100.0, 250.0, 300.0)
REPORT = Report(
    "foretick bench stream",
    "2026-01-01 00:00",
    2,
    MACHINE,
    ring=RingRate(512, Rates(9, [8.0e6, 4.0e6, 6.0e6]), *[Rates(9, [2.0e6])] * 3),
    hits=Hits(
        2000,
        [
            Condition("still", 1, FAST, None, FAST, FAST, 1.0, 0.0, 0.0, 0.0),
            Condition("moving", 1, None, SLOW, FAST, FAST, 0.0, 0.99, 3.0, 900.0),
        ],
    ),
)


def test_tables_show_medians_ranges_and_ratios() -> None:
    """The ring's median with its range and over the queue; what did not occur is an empty cell."""
    text = render(REPORT)
    assert "| ring, 512 at a time | 6,000,000 | 4,000,000 to 8,000,000 | 1.00 |" in text
    assert "| `multiprocessing.Queue`, one by one | 2,000,000 | 2,000,000 to 2,000,000 | 3.00 |" in text
    assert "| moving | 1 |  | 0.50 / 0.90 | 0.50 / 0.90 |  | 100 / 250 | 0 | 10 (about 1.0 s) | 99% |" in text
    assert "Kafka to bars" not in text


def test_a_page_keeps_everything_outside_its_markers(tmp_path: Path) -> None:
    """Twice into the same page gives the same page."""
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):
        put_into(page, "results", render(REPORT))
        text = page.read_text()
        assert text.startswith(f"before\n{BEGIN}\n")
        assert text.endswith(f"{END}\nafter\n")
        assert "old" not in text
        assert text.count("6,000,000") == 1


@pytest.mark.parametrize("text", ["", BEGIN, f"{END}{BEGIN}", f"{BEGIN}{END}{END}"])
def test_a_page_without_its_markers_is_left_alone(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match="results: begin"):
        put_into(page, "results", "tables")
    assert page.read_text() == text


def test_the_command_saves_what_it_prints(tmp_path: Path) -> None:
    """`stream --json` then `render` and `render --into` give the tables that were printed."""
    saved, page = tmp_path / "run.json", tmp_path / "page.md"
    page.write_text(f"{BEGIN}{END}")
    run = CliRunner().invoke(bench, ["stream", "--quick", "--part", "ring", "--json", str(saved)])
    assert run.exit_code == 0, run.output
    assert run.stdout == CliRunner().invoke(bench, ["render", str(saved)]).stdout
    assert "### Ring" in run.stdout
    assert CliRunner().invoke(bench, ["render", str(saved), "--into", str(page)]).exit_code == 0
    assert run.stdout in page.read_text()


@pytest.mark.parametrize("name", ["stream", "engine", "scheduler"])
def test_the_committed_page_is_the_committed_measurement(tmp_path: Path, name: str) -> None:
    """docs/benchmarks.md holds the tables of docs/measurements/*.json, nothing typed by hand."""
    page = tmp_path / "benchmarks.md"
    committed = (DOCS / "benchmarks.md").read_text()
    page.write_text(committed)
    put_into(page, *tables_of(DOCS / "measurements" / f"{name}.json"))
    assert page.read_text() == committed
