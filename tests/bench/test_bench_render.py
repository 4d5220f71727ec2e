"""Tables show what was measured, and the committed pages are the committed measurements."""

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from bench.cli import bench
from bench.figures import Figure, Goal, Machine, Part, Suite
from bench.render import BEGIN, END, goals, page, put_into
from bench.run import read, save
from bench.suites import SUITES

DOCS = Path(__file__).parents[2] / "docs"
NAMES = [name for name in SUITES if (DOCS / "measurements" / f"{name}.json").exists()]
MACHINE = Machine("a processor", 2, "3.11", {"torch": "2"})


def suite(*figures: Figure) -> Suite:
    part = Part(
        "hits", "Hits", "What it is.", "foretick bench stream", "abc1234", "2026-01-01 00:00+00:00", 9.0, 2,
        MACHINE, (0.5, 1.0), list(figures),
    )  # fmt: skip
    return Suite("stream", [part])


def test_a_saved_suite_is_read_as_it_was(tmp_path: Path) -> None:
    """With figures, and with none."""
    for figures in ([], [Figure("ring", 6e6, goal=Goal(1.0), samples=[1.0, 2.0]), Figure("hits", 3.0)]):
        save(tmp_path / "run.json", suite(*figures))
        assert read(tmp_path / "run.json") == suite(*figures)


def test_verdicts_on_a_gpu_name_it() -> None:
    """A CPU beside it is only what fed it."""
    figures = [
        Figure("ring", 6.0, goal=Goal(5.0, of="ours"), setting={"device": name}) for name in ("GPU 9", "CPU")
    ]
    assert "Measured on a processor with GPU 9: times, and verdicts on them, are of that GPU" in page(
        suite(*figures)
    )
    assert "| a processor with GPU 9 | missed |" in goals([suite(*figures)])
    assert "Measured on a processor: times, and verdicts on them, are of that CPU" in page(suite(figures[1]))


@pytest.mark.parametrize("text", ["", BEGIN, f"{END}{BEGIN}", f"{BEGIN}{END}{END}"])
def test_a_page_without_its_markers_is_left_alone(tmp_path: Path, text: str) -> None:
    target = tmp_path / "page.md"
    target.write_text(text)
    with pytest.raises(ValueError, match="goals: begin"):
        put_into(target, "table")
    assert target.read_text() == text


def test_the_command_saves_what_it_prints_and_keeps_other_parts(tmp_path: Path) -> None:
    saved = tmp_path / "run.json"
    command = ["scheduler", "--quick", "--part", "cost", "--json", str(saved)]
    run = CliRunner().invoke(bench, command)
    assert run.exit_code == 0, run.output
    assert run.stdout == CliRunner().invoke(bench, ["render", str(saved)]).stdout
    other = read(saved).parts[0]
    others = [msgspec.structs.replace(other, name=name) for name in ("gone", "prefix")]
    save(saved, Suite("scheduler", others))
    assert CliRunner().invoke(bench, command).exit_code == 0
    assert [part.name for part in read(saved).parts] == ["cost", "prefix", "gone"]


def test_one_command_measures_and_renders_everything(tmp_path: Path) -> None:
    """Into a copy of docs: the suite's JSON, its page, the pages of the other suites, and the goals."""
    measurements = tmp_path / "measurements"
    measurements.mkdir()
    save(measurements / "stream.json", suite(Figure("ring", 6.0, goal=Goal(5.0, of="ours"))))
    (tmp_path / "benchmarks.md").write_text(f"{BEGIN}{END}")
    command = ["scheduler", "--quick", "--part", "cost", "--docs", str(tmp_path)]
    run = CliRunner().invoke(bench, command)
    assert run.exit_code == 0, run.output
    for name in ("stream", "scheduler"):
        found = read(measurements / f"{name}.json")
        assert (measurements / f"{name}.md").read_text() == page(found)
    assert "| ring | at most 5 | 6 |" in (tmp_path / "benchmarks.md").read_text()
    both = CliRunner().invoke(bench, [*command, "--json", str(tmp_path / "run.json")])
    assert "either --json or --docs" in both.output


def test_every_table_that_is_published_can_be_measured_again() -> None:
    """A page of a suite, or a part of one, whose code has gone is deleted with it."""
    published = {path.stem: path for path in (DOCS / "measurements").glob("*.json")}
    assert published.keys() <= SUITES.keys()
    orphans = {n: {part.name for part in read(p).parts} - SUITES[n].keys() for n, p in published.items()}
    assert not any(orphans.values()), orphans


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_page_is_the_committed_measurement(name: str) -> None:
    """docs/measurements/*.md are rendered from the JSON in the same directory."""
    found = read(DOCS / "measurements" / f"{name}.json")
    assert page(found) == (DOCS / "measurements" / f"{name}.md").read_text()


def test_the_committed_goals_are_those_of_the_committed_measurements(tmp_path: Path) -> None:
    target = tmp_path / "benchmarks.md"
    committed = (DOCS / "benchmarks.md").read_text()
    target.write_text(committed)
    put_into(target, goals(read(DOCS / "measurements" / f"{name}.json") for name in NAMES))
    assert target.read_text() == committed
