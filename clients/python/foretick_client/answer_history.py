"""Answers of the past as a frame, from the Parquet files of `foretick history` and `foretick backfill`.

It needs pyarrow, and pandas or polars for their frames: the extras of this package are named after them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from foretick_client.bar_table import FROM_BAR, BarTable

Frame = Literal["pandas", "polars", "arrow"]


def history(
    path: str | Path | Sequence[str | Path],
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    sessions: Iterable[str] = (),
    questions: Iterable[str] = (),
    bars: str | Path | None = None,
    right: Any = None,
    frame: Frame = "pandas",
) -> Any:
    """The answers of ``path`` (a file, a directory, or several files), by the time of their data.

    ``since`` and ``until``, which is excluded, have a time zone. ``bars``: the CSV file of
    ``foretick replay --bars``; each answer gets the bar that its id names, or, where that names none, the one
    of its symbol that its newest record lies in, as it was when it closed, in columns ``bar_open`` and so on,
    as text, which is exact; null where the file lacks it. ``right``:
    an Arrow table, or what makes one (such as a frame), with ``session``, ``question``, ``data_version`` and
    ``right``; answers get ``right`` and ``is_right``, null where it is not known.

    Raises ModuleNotFoundError without a library, OSError, and ValueError for a time without a zone, for an
    answer of which several are said to be right, and for ``right`` where the files have that column.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.dataset as ds

    given = [str(each) for each in path] if isinstance(path, list | tuple) else str(path)
    wanted = pc.scalar(True)
    for name, values in (("session", tuple(sessions)), ("question", tuple(questions))):
        if values:
            wanted &= pc.field(name).isin(values)
    if since is not None:
        wanted &= pc.field("as_of") >= _instant(since, pa)
    if until is not None:
        wanted &= pc.field("as_of") < _instant(until, pa)
    table = ds.dataset(given, format="parquet").to_table(filter=wanted)
    # the same order whatever the files' order is
    table = table.sort_by([(name, "ascending") for name in ("as_of", "session", "question", "data_version")])
    if bars is not None:
        table = _with_bars(table, bars)
    if right is not None:
        table = _with_right(table, right)
    if frame == "arrow":
        return table
    if frame == "pandas":
        return table.to_pandas()
    import polars

    return polars.from_arrow(table)


def _instant(moment: datetime, pa: Any) -> Any:
    if moment.tzinfo is None:
        raise ValueError(f"{moment} has no time zone")
    return pa.scalar(moment, pa.timestamp("ns", "UTC"))


def _with_bars(table: Any, path: str | Path) -> Any:
    """Each answer beside its newest bar."""
    import pyarrow as pa

    bars = BarTable.read(path)
    known = [table["session"], table["symbol"], table["as_of"].cast("int64"), table["answer_id"]]
    found = [bars.row(*key) for key in zip(*(each.to_pylist() for each in known), strict=True)]
    for name in FROM_BAR:
        values = [None if row is None else getattr(row, name) for row in found]
        table = table.append_column(f"bar_{name}", pa.array(values, pa.string()))
    return table


def _with_right(table: Any, right: Any) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    keys = ["session", "question", "data_version"]
    if "right" in table.column_names:
        raise ValueError("right: the files say what was right")
    known = right if isinstance(right, pa.Table) else pa.table(right)
    fields = [*map(table.schema.field, keys), table.schema.field("text").with_name("right")]
    known = known.select([*keys, "right"]).cast(pa.schema(fields))  # frames have texts of other types
    at = table.select(keys).append_column("row", pa.array(range(len(table))))
    joined = at.join(known, keys, join_type="left outer").sort_by("row")
    if len(joined) != len(table):
        raise ValueError("right: an answer has several right ones")
    table = table.append_column("right", joined["right"])
    return table.append_column("is_right", pc.equal(table["text"], table["right"]))
