"""The values of a configuration by their dotted keys."""

from collections.abc import Iterator
from typing import Any

import msgspec


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """All values in a struct, in those inside it and in lists: of `sources[0].kafka.topics[1]`, too."""
    if isinstance(value, msgspec.Struct):
        for each in msgspec.structs.fields(value):
            yield from leaves(getattr(value, each.name), f"{key}.{each.encode_name}".lstrip("."))
    elif isinstance(value, tuple):
        for index, each in enumerate(value):
            yield from leaves(each, f"{key}[{index}]")
    else:
        yield key, value


def named(value: Any, *names: str) -> Iterator[tuple[str, str]]:
    """The texts that are not empty whose key ends with one of ``names``, or is in a list of that name."""
    for key, each in leaves(value):
        if key.rpartition(".")[2].partition("[")[0] in names and isinstance(each, str) and each:
            yield key, each
