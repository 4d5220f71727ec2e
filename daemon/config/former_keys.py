"""Keys and values of released versions that are no more, and what stands in their place."""

import re

KEYS = {
    "scheduler.chunk_max": "a chunk is at most scheduler.max_batch_tokens: remove the key",
    "scheduler.grouping": "common beginnings are always computed once: remove the key",
    "scheduler.seed": "nothing is drawn any more: remove the key",
    "sessions.max_staleness_bars": "sessions.max_staleness, a duration, is the freshness objective now",
    "source.behind": "it is named source.backlog_policy now",
}
"""By dotted key, without the numbers of tables of a list."""
VALUES = {"bars.empty": {"say": "emit"}, "sessions.empty": {"say": "emit"}}
"""The new name of each value that was renamed."""
_NUMBER = re.compile(r"\[\d+\]|\.\d+(?=\.|$)")


def plain(key: str) -> str:
    """The key without numbers of tables, as the file has it: `patterns[0].empty` is `sessions.empty`."""
    return re.sub(r"^patterns\b", "sessions", _NUMBER.sub("", key))


def renamed_value(key: str, value: object) -> str:
    """What to say of a value that had another name; nothing of others."""
    new = VALUES.get(plain(key), {}).get(str(value), "")
    return f"; {value} is named {new} now" if new else ""
