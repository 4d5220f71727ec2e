"""`foretick feed test`: its goals on generated and recorded tapes, and that it notices what is missed."""

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from daemon.cli import feed
from daemon.cli.feed import Tape, generated_day, recorded, tape_scores
from ingest import fault_injection
from ingest.fault_injection import FAULTS, Score
from ingest.record import RECORD
from metrics.feed_faults import ALL_KINDS

SECONDS = 16_000
FORM = """
description = "trades"
container = "csv"
header = true
[[records]]
kind = "trade"
venue = "V"
time = { field = "time", format = "epoch-ms" }
fields = { symbol = "symbol", price = "price", size = "size", id = "id" }
"""
RECORDINGS = {
    "histdata_eurusd_ticks_20200101.csv": "histdata_quotes",
    "binance_spot_btcusdt_20240808_raw.gz": "binance_capture",
    "btc_perp_1m_202201.csv": "btc_perp_bars",
    "sp500_index_1m_20191105.csv": "sp500_bars",
}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(feed.command, ["test", *arguments])


@pytest.fixture(scope="module")
def day() -> list[Tape]:
    """A part of a day."""
    return generated_day(1, SECONDS)


@pytest.fixture(scope="module")
def found(day: list[Tape]) -> dict[str, list[Score]]:
    return {tape.name: list(tape_scores(tape, 1)) for tape in day}


def expect_goals(tape: str, scores: Iterable[Score]) -> None:
    for score in scores:
        assert score.injected >= FAULTS, (tape, score)
        assert score.recall >= feed.RECALL, (tape, score)
        assert score.false_alarms + score.before <= feed.MAX_FALSE_ALARMS, (tape, score)


def test_forty_faults_of_each_kind_are_found_and_nothing_else(found: dict[str, list[Score]]) -> None:
    for tape, scores in found.items():
        expect_goals(tape, scores)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 5))
def test_so_are_those_of_whole_days(seed: int) -> None:
    for tape in generated_day(seed):
        expect_goals(tape.name, tape_scores(tape, seed))


def test_every_kind_is_in_the_table_but_what_needs_two_feeds(found: dict[str, list[Score]]) -> None:
    named = {score.kind.removesuffix("_content") for scores in found.values() for score in scores}
    assert named == {kind.name for kind in ALL_KINDS} - {"venue_behind"}


def written(folder: Path, rows: list[tuple[int, str, int, str, int]]) -> tuple[str, str]:
    """Trades of (ms, symbol, price, size, id) as a file, and their format."""
    form, file = folder / "form.toml", folder / "trades.csv"
    form.write_text(FORM)
    lines = [",".join(map(str, row)) for row in rows]
    file.write_text("\n".join(["time,symbol,price,size,id", *lines]) + "\n")
    return str(file), str(form)


def trades(n: int = 9000) -> list[tuple[int, str, int, str, int]]:
    rng = np.random.default_rng(3)
    times = 1_767_571_200_000 + np.cumsum(rng.integers(20, 200, n))
    prices = 10_000 + np.cumsum(rng.integers(-1, 2, n))
    symbols = rng.choice(["A", "A", "B"], n)
    return [
        (int(t), str(s), int(p), "1", k)
        for k, (t, s, p) in enumerate(zip(times, symbols, prices, strict=True))
    ]


def test_a_recording_of_several_symbols_is_tested(tmp_path: Path) -> None:
    file, form = written(tmp_path, trades())
    done = run(file, "--format", form)
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.output.splitlines()]
    assert lines[0][:2] == ["records", "kind"]
    assert {line[0] for line in lines[1:]} == {"trades"}
    assert ["trades", "bad_tick", "40", "40", "100.0%", "0", "0"] in lines


def test_what_is_wrong_with_a_recording_is_shown_and_no_false_alarm(tmp_path: Path) -> None:
    rows = trades()
    for at in (500, 700, 900):
        moment, symbol, price, _, number = rows[at]
        rows[at] = moment, symbol, price, "0", number
    file, form = written(tmp_path, rows)
    done = run(file, "--format", form)
    assert done.exit_code == 0, done.output
    (line,) = [each.split() for each in done.output.splitlines() if "zero_size" in each]
    assert line[-2:] == ["0", "3"]


@pytest.mark.parametrize("breaks", ["misses", "false alarms"])
def test_missed_goals_are_named_and_end_with_status_1(
    breaks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fault_injection.find

    def find(tape: np.ndarray, kind: str, splits: tuple[tuple[int, float], ...] = ()) -> np.ndarray:
        seen = real(tape, kind, splits)
        if kind != "bad_tick" or not len(seen):
            return seen
        return seen[1:] if breaks == "misses" else np.concatenate([seen, [5, 6]])

    monkeypatch.setattr(fault_injection, "find", find)
    file, form = written(tmp_path, trades())
    done = run(file, "--format", form)
    assert done.exit_code == 1
    assert [line.split()[1] for line in done.output.splitlines() if "MISSED" in line] == ["bad_tick"]


@pytest.mark.parametrize(
    "arguments", [(), ("x.csv",), ("--generated", "x.csv"), ("x.csv", "--generated", "--format", "y")]
)
def test_a_file_has_a_format_and_a_generated_day_none(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


def test_a_file_without_a_record_is_refused(tmp_path: Path) -> None:
    file, form = written(tmp_path, [])
    done = run(file, "--format", form)
    assert done.exit_code == 2
    assert "holds no record" in done.output
    assert run(str(tmp_path / "none.csv"), "--format", form).exit_code == 2


def test_a_short_recording_is_tested_as_far_as_it_goes(tmp_path: Path) -> None:
    file, form = written(tmp_path, trades(60))
    done = run(file, "--format", form)
    assert done.exit_code == 0, done.output
    assert [line.split()[1] for line in done.output.splitlines()[1:]] == ["negative_size", "unit_change"]


def test_a_tape_covers_at_least_a_day() -> None:
    rows = np.zeros(2, RECORD)
    assert Tape("", rows, []).days == 1
    rows["ts_event"][1] = 3 * 86_400 * 10**9
    assert Tape("", rows, []).days == 3


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", RECORDINGS)
def test_faults_are_found_in_real_recordings(name: str) -> None:
    folder = os.environ.get("FORETICK_DATA")
    if not folder:
        pytest.skip("set FORETICK_DATA to the directory with the real data files")
    for tape in recorded(Path(folder) / name, RECORDINGS[name]):
        for score in tape_scores(tape, 1):
            assert score.recall >= feed.RECALL, score
            assert score.false_alarms <= feed.MAX_FALSE_ALARMS * tape.days, score
