"""Pictures of docs/images that are drawn by running the code: `python -m tests.docs.pictures` writes them."""

from collections import defaultdict
from pathlib import Path

from regions.tape import Retention
from tests.regions.numbered import append, grow, pool, slots_of, tape_of

FOLDER = Path(__file__).parents[2] / "docs" / "images"
_BLOCKS, _BLOCK_SIZE, _VERSIONS, _RECORD = 12, 4, 9, 4
_CELL, _ROW, _LEFT, _TOP = 13, 30, 96, 58
_FROZEN, _FORK, _FREE, _EDGE = "#2f6f8f", "#d9822b", "#f3f3f0", "#9a9a94"
_RECORDS = ("#7fb069", "#a9cf95", "#5d8f4b")
"""Neighbouring bars differ."""


def window() -> str:
    """Where the regions of a session are in the pool, version by version: a real `Tape`, as SVG.

    A bar of 4 tokens comes with each version, and the window keeps 16. At the last one a question forks it.
    """
    memory = pool(_BLOCKS, _BLOCK_SIZE)
    tape = tape_of(memory, Retention(4 * _RECORD))
    drawn = [_row(-1, dict.fromkeys(slots_of(tape.extents), _FROZEN), "frozen")]
    for version in range(_VERSIONS):
        append(memory, tape, [version] * _RECORD)
        live = [slot for first, count in tape.live_ranges for slot in range(first, first + count)]
        prefix = set(slots_of(tape.extents)) - set(live)
        colours = dict.fromkeys(prefix, _FROZEN)
        oldest = version + 1 - len(live) // _RECORD
        colours |= {s: _RECORDS[(oldest + at // _RECORD) % 3] for at, s in enumerate(live)}
        drawn.append(_row(version, colours, f"version {tape.version}"))
    fork = tape.fork()
    shared = set(slots_of(fork.extents))
    grow(memory, fork, [99] * 3)
    drawn.append(
        _row(_VERSIONS, colours | dict.fromkeys(set(slots_of(fork.extents)) - shared, _FORK), "a question")
    )
    fork.release()
    tape.release()
    return _svg("\n".join(drawn))


def _row(number: int, colours: dict[int, str], title: str) -> str:
    """A path for each colour, of one rectangle a slot."""
    y = _TOP + (number + 1) * _ROW
    places = defaultdict[str, list[str]](list)
    for slot in range(_BLOCKS * _BLOCK_SIZE):
        cell = f"M{_LEFT + slot * _CELL} {y}h{_CELL - 1}v{_ROW - 10}h{1 - _CELL}z"
        places[colours.get(slot, _FREE)].append(cell)
    paths = (f'<path fill="{colour}" d="{"".join(cells)}"/>' for colour, cells in places.items())
    return f'<text x="4" y="{y + 15}">{title}</text>\n' + "\n".join(paths)


def _svg(rows: str) -> str:
    width, height = _LEFT + _BLOCKS * _BLOCK_SIZE * _CELL + 8, _TOP + (_VERSIONS + 2) * _ROW + 8
    keys = (("frozen", _FROZEN), ("bars, one shade each", _RECORDS[0]), ("question", _FORK), ("free", _FREE))
    legend = "\n".join(
        f'<rect x="{_LEFT + at * 160}" y="10" width="12" height="12" fill="{colour}" stroke="{_EDGE}"/>'
        f'<text x="{_LEFT + at * 160 + 18}" y="21">{name}</text>'
        for at, (name, colour) in enumerate(keys)
    )
    edges = "\n".join(
        f'<line x1="{x}" x2="{x}" y1="{_TOP - 8}" y2="{height - 8}" stroke="{_EDGE}" stroke-width="0.5"/>'
        for x in (_LEFT - 0.5 + block * _BLOCK_SIZE * _CELL for block in range(_BLOCKS + 1))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"'
        f' font-size="12">\n<rect width="{width}" height="{height}" fill="white"/>\n{legend}\n'
        f'<text x="{_LEFT}" y="44">slots of the pool, in blocks of {_BLOCK_SIZE}</text>\n'
        f"{edges}\n{rows}\n</svg>\n"
    )


PICTURES = {"window.svg": window}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw())
