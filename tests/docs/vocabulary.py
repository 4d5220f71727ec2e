"""The words that this project does not use: home-made ones, and two names for one thing.

`python -m tests.docs.vocabulary` prints where they stand, and fails where there are more than are allowed.
The bounds only ever go down: lower one when you have written a sentence again.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

HOME_MADE = re.compile(
    r"\banew\b|(?<!dead-)\bletters?\b|\bis told\b|\bare told\b|\btold apart\b|\bpassed over\b|\bfor ever\b"
    r"|\bMOST_\w+"
    r"|\bheard\b|\bstands? by\b|\bat_once\b|\bnobody\b|\bno more\b(?! than)"
    r"|\bwhat is (?:to come|left|behind)\b|\bso many\b|\bso long as\b|\bbegins?_anew\b"
    r"|\bread_elsewhere\b|\bread_on\b|\btook_over\b|\bunsure\b",
    re.I,
)
"""Words, and what to write: reset, dead-letter record, notify, skipped, always, MAX_, on_event or last_seen,
standby, fast path, no one, at most, as many, while, reset, promoted, low_confidence or ambiguous."""
RENAMED = re.compile(
    r"\bsnapshots_unwritten_total\b|\bpromises_missed_total\b|\bno_json\b|\bsource\.behind\b|\bmax_staleness_bars\b"
)
"""Names that have another one now."""

MAX_WORDS = {"code": 5, "docs": 2}
"""How many there may be, by kind of file: code without tests, and pages."""

FORMER = {ROOT / "daemon/config/former_keys.py", ROOT / "docs/upgrades.md"}
"""They say what names of earlier releases are now."""


def files(kind: str) -> list[Path]:
    """The tracked files of a kind, but for the list of changes, which tells history."""
    patterns = ["*.py", ":!tests"] if kind == "code" else ["*.md", ":!CHANGELOG.md", ":!docs/measurements"]
    listed = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.split() if (ROOT / name).is_file()]


def found(path: Path, words: re.Pattern[str]) -> list[str]:
    """Each word of a file, as PATH:LINE: WORD."""
    lines = path.read_text(encoding="utf-8").splitlines()
    name = path.relative_to(ROOT)
    return [f"{name}:{n}: {m[0]}" for n, line in enumerate(lines, 1) for m in words.finditer(line)]


def problems() -> list[str]:
    """What is too much, or has another name now."""
    said = []
    for kind, most in MAX_WORDS.items():
        words = [word for path in files(kind) for word in found(path, HOME_MADE)]
        if len(words) > most:
            said += [*words, f"{kind}: {len(words)} home-made words, at most {most}"]
        renamed = [word for path in files(kind) if path not in FORMER for word in found(path, RENAMED)]
        said += [f"{each}, which is not used any more" for each in renamed]
    return said


if __name__ == "__main__":
    sys.exit("\n".join(problems()) or None)
