"""Figures as Markdown: a suite's page of tables, and the table of goals over all suites."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from pathlib import Path
from typing import TypeVar

from bench.figures import Figure, Part, Suite
from bench.run import read
from bench.suites import SUITES

T = TypeVar("T")

_ORDER = ("missed", "undecided", "met")
BEGIN, END = "<!-- goals: begin -->", "<!-- goals: end -->"


def page(suite: Suite) -> str:
    """Everything a suite measured."""
    parts = "\n\n".join(map(_part, suite.parts))
    title = f"# Measured: {suite.suite}"
    machines = " or ".join(dict.fromkeys(part.ran_on for part in suite.parts))
    kind = "GPU" if any(part.gpus for part in suite.parts) else "CPU"
    where = f"Measured on {machines}: times, and verdicts on them, are of that {kind}." if machines else ""
    note = f"Written by `foretick bench render`; see [benchmarks](../benchmarks.md). {where}".rstrip()
    return f"{title}\n\n{note}\n\n{parts}\n"


def goals(suites: Iterable[Suite]) -> str:
    """One row per goal with the worst of its figures; misses first."""
    rows = []
    for suite in suites:
        for part in suite.parts:
            title = f"[{part.title}](measurements/{suite.suite}.md#{part.name})"
            judged = [figure for figure in part.figures if figure.goal is not None]
            for figures in _grouped(judged, lambda f: (f.name, f.unit, f.against, f.goal)):
                alike = [figure for figure in part.figures if figure.name == figures[0].name]
                *row, verdict = _goal_row(figures, alike)
                rows.append((title, *row, part.ran_on, verdict))  # three loops
    rows.sort(key=lambda row: _ORDER.index(row[-1]))
    return table(("part", "figure", "goal", "worst", "where", "met", "CPU", "verdict"), rows)


def publish(docs: Path) -> list[Path]:
    """Write the page of every suite measured in ``docs``/measurements, and the table of goals.

    Returns the paths written. Raises OSError, and ValueError for a benchmarks.md without its markers.
    """
    found, written = list[Suite](), list[Path]()
    for name in SUITES:
        saved = docs / "measurements" / f"{name}.json"
        if saved.exists():
            found.append(read(saved))
            written.append(saved.with_suffix(".md"))
            written[-1].write_text(page(found[-1]), encoding="utf-8")
    put_into(docs / "benchmarks.md", goals(found))
    return [*written, docs / "benchmarks.md"]


def put_into(page: Path, text: str) -> None:
    """Replace the text between the page's two markers. Raises ValueError unless each occurs once."""
    old = page.read_text(encoding="utf-8")
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after or END in after:
        raise ValueError(f"the page needs one {BEGIN} and one {END} after it")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are numbers."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def number(value: float, unit: str = "") -> str:
    """About three digits; shares in per cent."""
    if unit == "share":
        return f"{value:.0%}" if value >= 0.1 or not value else f"{value:.1%}"
    if float(value).is_integer() or abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) < 0.001:
        return f"{value:.1g}"
    return f"{value:.{1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 else 4}f}"


def _part(part: Part) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in part.machine.packages.items())
    load = f", load {part.load[0]:.1f} to {part.load[1]:.1f}" if part.load else ""
    took = f", {part.seconds:,.0f} s" if part.seconds else ""
    head = (
        f"`{part.command}`, commit {part.commit}, {part.started}{took}. {part.machine.processor}, "
        f"{part.machine.cores} cores, {part.threads} threads{load}; "
        f"Python {part.machine.python}, {packages}."
    )
    tables = map(_table, _grouped(part.figures, lambda figure: figure.table))
    title = f'<a id="{part.name}"></a>\n\n## {part.title}'
    return "\n\n".join((title, part.about, head, *tables))


def _table(figures: Sequence[Figure]) -> str:
    """A row for each setting; what all settings share goes above the table."""
    settings = [{key: _shown(value) for key, value in f.setting.items()} for f in figures]
    keys = list(dict.fromkeys(key for setting in settings for key in setting))
    common = [key for key in keys if len({setting.get(key) for setting in settings}) == 1]
    axes = [key for key in keys if key not in common]
    rows: dict[tuple[str, ...], list[Figure]] = {}
    for figure, setting in zip(figures, settings, strict=True):
        rows.setdefault(tuple(setting.get(key, "") for key in axes), []).append(figure)
    columns = list(_columns(figures))
    cells = [
        (*row, *(next((shown[id(f)] for f in same if id(f) in shown), "") for _, shown in columns))
        for row, same in rows.items()
    ]
    body = table([*axes, *(header for header, _ in columns)], cells) if axes else _listed(figures)
    title = f"### {figures[0].table}" if figures[0].table else ""
    shared = "; ".join(f"{key} {settings[0][key]}" for key in common)
    return "\n\n".join(filter(None, (title, f"{shared}." if shared else "", body)))


def _listed(figures: Sequence[Figure]) -> str:
    """Figures of one setting, one row each."""
    columns: dict[str, Callable[[Figure], str]] = {
        "": _named, "ours": _spread, "against": lambda figure: figure.against, "reference": _reference,
        "ratio": _ratio, "goal": _judged,
    }  # fmt: skip
    used = [header for header, show in columns.items() if any(map(show, figures))]
    return table(used, [[columns[header](figure) for header in used] for figure in figures])


def _columns(figures: Sequence[Figure]) -> Iterator[tuple[str, dict[int, str]]]:
    """For each name: ours, each reference with its ratio, and the verdict; cells by figure id."""
    for same in _grouped(figures, lambda figure: (figure.name, figure.unit)):
        columns = [(_named(same[0]), _spread, same)]
        for some in _grouped([figure for figure in same if figure.against], lambda figure: figure.against):
            columns += [(some[0].against, _reference, some), (f"/ {some[0].against}", _ratio, some)]
        for header, show, some in (*columns, ("goal", _judged, same)):
            if cells := {id(figure): text for figure in some if (text := show(figure))}:
                yield header, cells


def _goal_row(figures: Sequence[Figure], alike: Sequence[Figure]) -> tuple[str, ...]:
    """The worst of ``figures``, labelled by what tells them apart."""
    worst = max(figures, key=lambda f: f.goal.excess(f.judged) if f.goal else -inf)
    assert worst.goal is not None  # only such are given
    of_ours = worst.goal.of == "ours"
    name = _named(worst) if of_ours else f"{worst.name} / {worst.against}"
    value = _spread(worst) if of_ours else _ratio(worst)
    differing = [
        f"{key} {_shown(value)}".strip()
        for key, value in worst.setting.items()
        if any(figure.setting.get(key) != value for figure in alike)
    ]
    where = "; ".join(([worst.table] if len({f.table for f in alike}) > 1 else []) + differing)
    met = sum(figure.verdict == "met" for figure in figures)
    verdict = min((figure.verdict for figure in figures), key=_ORDER.index)
    return name, _limit(worst), value, where, f"{met} of {len(figures)}", verdict


def _named(figure: Figure) -> str:
    return figure.name if figure.unit in ("", "share") else f"{figure.name}, {figure.unit}"


def _limit(figure: Figure) -> str:
    assert figure.goal is not None  # only such are given
    return f"{figure.goal.side} {number(figure.goal.limit, figure.unit if figure.goal.of == 'ours' else '')}"


def _judged(figure: Figure) -> str:
    return f"{_limit(figure)}: {figure.verdict}" if figure.goal else ""


def _spread(figure: Figure) -> str:
    text = number(figure.ours, figure.unit)
    if figure.low is None or figure.high is None or figure.low == figure.high:
        return text
    return f"{text} ({number(figure.low, figure.unit)} to {number(figure.high, figure.unit)})"


def _reference(figure: Figure) -> str:
    if figure.reference is None:
        return ""
    if isinstance(figure.reference, tuple):
        return " to ".join(number(end, figure.unit) for end in figure.reference)
    return number(figure.reference, figure.unit)


def _ratio(figure: Figure) -> str:
    return "" if figure.ratio is None else number(figure.ratio)


def _shown(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _grouped(items: Sequence[T], key: Callable[[T], object]) -> list[list[T]]:
    """Items grouped by key, in the order of each key's first item."""
    groups: dict[object, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())
