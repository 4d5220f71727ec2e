"""Inputs near valid ones: a member changed for an odd value, or bytes damaged."""

import json
from copy import deepcopy
from typing import Any

import msgspec
from hypothesis import strategies as st

ODD: list[Any] = [
    None, True, -1, 0, 2**31, 2**63, -(2**63), 2**64 - 1, 1.5, 1e308, float("inf"), float("nan"), "",
    "x" * 300, "\0", "\U0001f600", "1e5", "-0", "nan", b"\xff", [], {}, [[]] * 3, {"a": {"b": []}},
]  # fmt: skip


@st.composite
def near(draw: st.DrawFn, seeds: tuple[bytes, ...]) -> bytes:
    """One of ``seeds`` with a member of its tree changed, where it is JSON or msgpack, or damaged bytes."""
    seed = draw(st.sampled_from(seeds))
    tree, packed = _tree(seed)
    if tree is not None and draw(st.booleans()):
        places = list(_places(tree))
        for place in draw(st.lists(st.sampled_from(places), min_size=1, max_size=3)) if places else []:
            odd = deepcopy(draw(st.sampled_from(ODD)))  # the next change may be within it
            _change(tree, place, odd, drop=draw(st.integers(0, 4)) == 0)
        try:
            return msgspec.msgpack.encode(tree) if packed else json.dumps(tree, default=repr).encode()
        except (OverflowError, ValueError, msgspec.MsgspecError):
            return b""
    data = bytearray(seed)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.integers(0, 5)):
            case 0:
                del data[at:]
            case 1:
                data[at:at] = draw(st.binary(max_size=12))
            case 2:
                data[at:at] = draw(st.sampled_from([b"\x91", b"\x81\xa1a", b"[", b'{"a":'])) * 3000
            case 3:
                data[at:at] = data[: draw(st.integers(0, len(data)))]
            case _:
                data[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
    return bytes(data)


def _tree(data: bytes) -> tuple[Any, bool]:
    """(the value, whether it is msgpack); None for neither."""
    for decode, packed in ((msgspec.json.decode, False), (msgspec.msgpack.decode, True)):
        try:
            found = decode(data)
        except (msgspec.MsgspecError, ValueError):
            continue
        if isinstance(found, dict | list):
            return found, packed
    return None, False


def _places(tree: Any, path: tuple[Any, ...] = ()) -> Any:
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from _places(child, (*path, key))


def _change(tree: Any, place: tuple[Any, ...], value: Any, *, drop: bool) -> None:
    """Set or drop a member; places that an earlier change took away are left alone."""
    for key in place[:-1]:
        if not isinstance(tree, dict | list):
            return
        if isinstance(tree, list) and (not isinstance(key, int) or key >= len(tree)):
            return
        tree = tree.get(key) if isinstance(tree, dict) else tree[key]
    key = place[-1]
    if isinstance(tree, dict):
        if drop:
            tree.pop(key, None)
        else:
            tree[key] = value
    elif isinstance(tree, list) and isinstance(key, int) and key < len(tree):
        tree[key] = value
