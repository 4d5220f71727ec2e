"""`foretick feasible` from the command line."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from daemon.cli.main import main
from lab.theory.query_stream import QueryStream, ttfts


def ask(folder: Path, queries: list[tuple[str, float]], *options: str) -> Result:
    path = folder / "trace.jsonl"
    lines = [json.dumps({"text": text, "arrival": arrival}) for text, arrival in queries]
    path.write_text("\n".join(lines), encoding="utf-8")
    return CliRunner().invoke(main, ["feasible", str(path), *options])


# The paper's example: two users, two documents each, all at once.
BURST = [("uuuuuaaaaa", 0.0), ("vvvvvbbbbb", 0.0), ("uuuuuccccc", 0.0), ("vvvvvddddd", 0.0)]


def test_the_command_prints_a_schedule_that_meets_the_bound(tmp_path: Path) -> None:
    result = ask(tmp_path, BURST, "--ttft", "30", "--percentile", "0.25", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    stream = QueryStream(tuple(tuple(map(ord, text)) for text, _ in BURST), (0,) * 4)
    assert found["ttfts"] == list(ttfts(stream, found["order"]))
    assert max(found["ttfts"]) == 30
    assert (found["none_meets_all"], found["late"], found["allowed_late"]) == (False, 0, 1)
    assert found["percentile_ttft"] == 25
    table = ask(tmp_path, BURST, "--ttft", "30", "--percentile", "0.25").stdout
    assert table.startswith("4 of 4 queries within 30 (P75 is 25)\n")
    assert len(table.splitlines()) == 6


def test_the_command_prints_a_percentile_schedule_with_the_certificate(tmp_path: Path) -> None:
    result = ask(tmp_path, BURST, "--ttft", "25", "--percentile", "0.25")
    assert result.exit_code == 0
    assert result.stdout.startswith(
        "3 of 4 queries within 25 (P75 is 25), and no schedule meets it for all\n"
    )
    assert result.stdout.count("late") == 1


def test_the_command_ends_with_1_when_only_the_certificate_is_known(tmp_path: Path) -> None:
    result = ask(tmp_path, BURST, "--ttft", "29", "--percentile", "0.2")
    assert result.exit_code == 1
    assert result.stdout.startswith("no schedule meets a TTFT of 29 for all 4 queries")
    found = json.loads(ask(tmp_path, BURST, "--ttft", "29", "--percentile", "0.2", "--json").stdout)
    assert (found["none_meets_all"], found["order"], found["ttfts"]) == (True, None, None)


def test_attention_counts_when_asked_for(tmp_path: Path) -> None:
    options = ["--ttft", "30", "--percentile", "0"]
    assert ask(tmp_path, BURST, *options).exit_code == 0
    assert ask(tmp_path, BURST, *options, "--c-attn", "0.1").exit_code == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--ttft", "30", "--percentile", "95"], "0.05 for P95"),
        (["--ttft", "0", "--percentile", "0.1"], "time above 0"),
        (["--ttft", "nan", "--percentile", "0.1"], "time above 0"),
        (["--ttft", "1", "--percentile", "0.1", "--c-attn", "-1"], "c_attn must be 0 or more"),
    ],
)
def test_the_command_refuses_bad_numbers(tmp_path: Path, options: list[str], says: str) -> None:
    result = ask(tmp_path, BURST, *options)
    assert result.exit_code == 2
    assert says in result.stderr


def test_the_command_names_a_bad_line(tmp_path: Path) -> None:
    result = ask(tmp_path, [("", 0)], "--ttft", "1", "--percentile", "0.1")
    assert result.exit_code == 2
    assert result.stderr == "line 1: the prompt is empty\n"
