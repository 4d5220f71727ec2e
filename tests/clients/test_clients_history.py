"""`foretick_client.history`: answers of the past as a frame, beside their bars and what was right."""

import importlib.util
import random
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from daemon.audit import bar_table
from daemon.audit.published import parquet_writer

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

SECOND = 1_000_000_000
NOON = 1_723_204_800
SYMBOLS = {"aaa": "V:AAA", "bbb": "V:BBB"}


def load() -> ModuleType:
    """The client is a distribution of its own; of the others this module needs only that of bars."""
    sys.modules.setdefault("foretick_client", ModuleType("foretick_client"))
    sys.modules.setdefault("foretick_client.bar_table", bar_table)
    file = Path(__file__).parents[2] / "clients/python/foretick_client/answer_history.py"
    spec = importlib.util.spec_from_file_location("answer_history_of_the_client", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HISTORY = load()


def moment(at_s: int) -> datetime:
    return datetime.fromtimestamp(at_s, UTC)


def row(n: int, session: str, question: str, at_s: int) -> dict[str, Any]:
    known = {"as_of": at_s * SECOND, "session": session, "symbol": SYMBOLS[session], "question": question}
    said = {"data_version": n, "text": "UP" if n % 3 else "DOWN", "flags": ["replay"] if n % 2 else []}
    judged = ("choice", "probability", "choice_set", "uncalibrated", "act", "abstain_reason", "logit_gap")
    others = ("value", *judged, "model", "model_revision")
    rest = ("published_at", "staleness_ns", "answer_id", "epoch", "sequence")
    return {**dict.fromkeys((*others, *rest)), **known, **said}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Of two sessions and two questions, over fifty minutes."""
    draw = random.Random(3)
    return [
        row(n, session, question, NOON + 60 * n + draw.randint(0, 59))
        for session in SYMBOLS
        for question in ("trend", "high")
        for n in range(50)
    ]


@pytest.fixture(scope="module")
def directory(rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In two files, in no order."""
    folder = tmp_path_factory.mktemp("answers")
    mixed = random.Random(4).sample(rows, len(rows))
    for name, some in (("a", mixed[:70]), ("b", mixed[70:])):
        with parquet_writer(folder / f"{name}.parquet") as write:
            for each in some:
                write(each)
    return folder


def keys(found: Any) -> list[tuple[str, str, int]]:
    return [(r["session"], r["question"], r["data_version"]) for r in found.to_pylist()]


def test_filters_and_order(rows: list[dict[str, Any]], directory: Path) -> None:
    since, until = NOON + 600, NOON + 1200
    found = HISTORY.history(
        directory,
        since=moment(since),
        until=moment(until),
        sessions=["aaa"],
        questions=["trend"],
        frame="arrow",
    )
    expected = [
        r
        for r in sorted(rows, key=lambda r: r["as_of"])
        if r["session"] == "aaa"
        and r["question"] == "trend"
        and since * SECOND <= r["as_of"] < until * SECOND
    ]
    assert keys(found) == [(r["session"], r["question"], r["data_version"]) for r in expected]
    assert len(expected) == 10
    files = sorted(map(str, directory.iterdir()))
    assert HISTORY.history(files, frame="arrow") == HISTORY.history(directory, frame="arrow")
    with pytest.raises(ValueError, match="no time zone"):
        HISTORY.history(directory, since=datetime(2024, 8, 9), frame="arrow")


def test_each_answer_is_beside_the_bar_that_holds_it(
    rows: list[dict[str, Any]], directory: Path, tmp_path: Path
) -> None:
    """As it was when it closed: a correction came later. Every other bar is not in the file."""
    opens = [NOON + 60 * n for n in range(1, 50, 2)]
    head = "session,symbol,opens,interval,open,high,low,close,volume,records,flags"
    lines = [
        f"{session},{symbol},{moment(at):%Y-%m-%dT%H:%M:%S}.000000000Z,60000000000,1,2,0.5,{at}.{number},9,4,"
        for number, (session, symbol) in enumerate(SYMBOLS.items())
        for at in opens
    ]
    amended = [f"{line.rpartition(',')[0].replace('.5,', '.25,')},amended" for line in lines[:3]]
    file = tmp_path / "bars.csv"
    file.write_text("\n".join([head, *lines, *amended]) + "\n")
    found = HISTORY.history(directory, bars=file, frame="arrow").to_pylist()
    assert len(found) == len(rows)
    for each in found:
        at = each["as_of"].timestamp()
        holds = [opened for opened in opens if opened <= at < opened + 60]
        number = list(SYMBOLS).index(each["session"])
        assert each["bar_close"] == (f"{holds[0]}.{number}" if holds else None)
        assert each["bar_low"] == ("0.5" if holds else None)
    assert {each["bar_close"] is None for each in found} == {True, False}


def test_an_id_names_the_bar_or_there_is_none(tmp_path: Path) -> None:
    """One whose opening is not in the file has no other bar in its place."""
    named = [row(n, "aaa", "trend", NOON + 60 * n) for n in range(4)]
    for n, each in enumerate(named):
        each["answer_id"] = f"aaa:h:{(NOON + 60 * (n - 1)) * SECOND}"
    with parquet_writer(tmp_path / "named.parquet") as write:
        for each in named:
            write(each)
    head = "session,symbol,opens,interval,open,high,low,close,volume,records,flags"
    lines = [
        f"aaa,V:AAA,{moment(NOON + 60 * n):%Y-%m-%dT%H:%M:%S}.000000000Z,60000000000,1,2,0.5,{n},9,4,"
        for n in (0, 1, 3)
    ]
    (tmp_path / "bars.csv").write_text("\n".join([head, *lines]) + "\n")
    found = HISTORY.history(tmp_path / "named.parquet", bars=tmp_path / "bars.csv", frame="arrow")
    assert found["bar_close"].to_pylist() == [None, "0", "1", None]


@pytest.mark.parametrize("texts", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())])
def test_what_was_right_stands_where_it_is_known(texts: Any, directory: Path, tmp_path: Path) -> None:
    """Also where it is of a frame of pandas or polars, whose texts are of another type."""
    known = [("aaa", "trend", 4, "UP"), ("bbb", "trend", 6, "UP")]
    right = dict(zip(("session", "question", "data_version", "right"), zip(*known, strict=True), strict=True))
    of_texts = {name: pa.array(right[name], texts) for name in ("session", "question", "right")}
    table = pa.table({name: list(values) for name, values in right.items()} | of_texts)
    plain = HISTORY.history(directory, frame="arrow")
    found = HISTORY.history(directory, right=table, frame="arrow")
    assert found.drop_columns(["right", "is_right"]) == plain
    told = {key: r["is_right"] for key, r in zip(keys(found), found.to_pylist(), strict=True)}
    assert (told.pop(("aaa", "trend", 4)), told.pop(("bbb", "trend", 6))) == (True, False)
    assert set(told.values()) == {None}
    with pytest.raises(ValueError, match="several"):
        HISTORY.history(directory, right=pa.concat_tables([table, table]), frame="arrow")
    parquet.write_table(found, tmp_path / "judged.parquet")
    with pytest.raises(ValueError, match="the files say"):
        HISTORY.history(tmp_path / "judged.parquet", right=table, frame="arrow")


@pytest.mark.parametrize("frame", ["pandas", "polars"])
def test_frames_hold_the_same(frame: str, directory: Path) -> None:
    pytest.importorskip(frame, reason=f"pip install {frame}")
    table, found = HISTORY.history(directory, frame="arrow"), HISTORY.history(directory, frame=frame)
    assert list(found.columns) == table.column_names
    assert list(found["data_version"]) == table["data_version"].to_pylist()
    assert list(found["text"]) == table["text"].to_pylist()
