"""A plain reference for `tapes.expressions`: one tape, the bars that are shown, one value at a time."""

import ast
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ingest.compact import CENTRE
from tapes.rules import VOLUMES
from tests.tapes.reference import Bar


class TooFew(Exception):
    """The value needs bars before the first that is shown."""


class Undefined(Exception):
    """There is no value, as of a division by zero."""


class Shown(NamedTuple):
    """Bars, the minute of each, and price units in a percent; the bars of the horizon, and one of them."""

    bars: Sequence[Bar]
    minutes: Sequence[int]
    percent: int
    to_come: Sequence[Bar] = ()
    future: Bar | None = None


def truth(source: str, shown: Shown, horizon: int = 0) -> bool | None:
    """Whether the expression holds at the newest bar; None where it is undefined, or not known yet."""
    if len(shown.to_come) < horizon:
        return None
    try:
        return bool(_value(ast.parse(source, mode="eval").body, shown, len(shown.bars) - 1))
    except (TooFew, Undefined):
        return None


def _value(node: ast.AST, shown: Shown, at: int) -> Any:
    bars, minutes, percent, _, future = shown
    if at < 0:
        raise TooFew
    match node:
        case ast.Attribute(attr="volume"):
            assert future is not None
            return float(VOLUMES[future.volume])
        case ast.Attribute(attr=name):
            return 100 * percent + getattr(future, name) - CENTRE
        case ast.Name(id="volume"):
            return float(VOLUMES[bars[at].volume])
        case ast.Name(id="time"):
            return minutes[at]
        case ast.Name(id="R"):
            if at < 19:
                raise TooFew
            return sum(bars[i].high - bars[i].low for i in range(at - 19, at + 1)) / 20 + 0.5
        case ast.Name(id=name):
            return 100 * percent + getattr(bars[at], name) - CENTRE
        case ast.Constant(value=str(text)):
            return 60 * int(text[:2]) + int(text[3:])
        case ast.Constant(value=value):
            return value
        case ast.Subscript(value=inner, slice=ast.Constant(value=int(back))):
            return _value(inner, shown, at - back)
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return _call(name, arguments, shown, at)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner, shown, at)
        case ast.UnaryOp(operand=inner):
            return not _value(inner, shown, at)
        case ast.BoolOp(op=op, values=parts):
            values = [_value(part, shown, at) for part in parts]
            return all(values) if isinstance(op, ast.And) else any(values)
        case ast.Compare(left=left, ops=ops, comparators=rest):
            sides = [_value(part, shown, at) for part in (left, *rest)]
            return all(_compare(op, a, b) for op, a, b in zip(ops, sides, sides[1:], strict=False))
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _value(left, shown, at), _value(right, shown, at)
            if isinstance(op, ast.Div):
                if b == 0:
                    raise Undefined
                return a / b
            return a + b if isinstance(op, ast.Add) else a - b if isinstance(op, ast.Sub) else a * b
    raise AssertionError(ast.dump(node))


def _compare(op: ast.cmpop, a: float, b: float) -> bool:
    if isinstance(op, ast.Gt | ast.GtE):
        return a > b or (isinstance(op, ast.GtE) and a == b)
    return a < b or (isinstance(op, ast.LtE) and a == b)


def _call(name: str, arguments: list[ast.expr], shown: Shown, at: int) -> Any:
    if name == "crossover":
        above = [_value(arguments[0], shown, i) > _value(arguments[1], shown, i) for i in (at, at - 1)]
        return above == [True, False]
    if name == "crossunder":
        below = [_value(arguments[0], shown, i) < _value(arguments[1], shown, i) for i in (at, at - 1)]
        return below == [True, False]
    if name in ("abs", "sign", "max", "min"):
        values = [_value(part, shown, at) for part in arguments]
        if name == "abs":
            return abs(values[0])
        if name == "sign":
            return (values[0] > 0) - (values[0] < 0)
        return max(values) if name == "max" else min(values)
    if len(arguments) == 1:
        return _ahead(name, [_value(arguments[0], shown._replace(future=each), at) for each in shown.to_come])
    return _window(name, _over(arguments, shown, at))


def _ahead(name: str, values: list[Any]) -> Any:
    """Over the bars of the horizon, the next one first."""
    if name == "last":
        return values[-1]
    if name == "until":
        return next((number for number, held in enumerate(values, 1) if held), len(values) + 1)
    return _window(name, values)


def _over(arguments: list[ast.expr], shown: Shown, at: int) -> list[Any]:
    """The values of a window, oldest first. Of all bars shown, those for which there are enough bars."""
    if isinstance(arguments[1], ast.Constant):
        bars: Any = arguments[1].value
        return [_value(arguments[0], shown, at - i) for i in reversed(range(bars))]
    found = []
    for i in range(at + 1):
        try:
            found.append(_value(arguments[0], shown, i))
        except TooFew:
            continue
    if not found:
        raise TooFew
    return found


def _window(name: str, values: list[Any]) -> Any:
    match name:
        case "highest":
            return max(values)
        case "lowest":
            return min(values)
        case "sum":
            return math.fsum(values)
        case "mean":
            return math.fsum(values) / len(values)
        case "any":
            return any(values)
        case "all":
            return all(values)
        case "count":
            return sum(values)
    first = values[0]
    total, squares = sum(v - first for v in values), sum((v - first) ** 2 for v in values)
    return math.sqrt(max(len(values) * squares - total**2, 0)) / len(values)
