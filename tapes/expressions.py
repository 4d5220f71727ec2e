"""Rules in words of a desk: expressions over bars, such as ``close > highest(high, 20)[1]``.

An expression is a pure function of the bars that a model is shown. It reads prices (``open``, ``high``,
``low``, ``close``), the ``volume``, ``R`` (the mean range of the last 20 bars plus half a price unit) and
``time``; ``x[k]`` is the value k bars ago. Each value is vectorised over tapes and bars, and has a dimension,
so that a price is never compared with a volume. As with `tapes.rules`, a condition is true, false or
undefined (too few bars, a division by zero), and has a distance to its boundary.

``future.close`` is the close of each bar to come, up to a horizon that is given apart; only a function of one
argument makes a value of it: ``highest(future.high) > 1.002 * close``. Everything else is known now.

The language is a subset of Python's expressions, read by `ast`; nothing is executed by Python.
"""

import ast
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingest.compact import CENTRE
from tapes.rules import VOLUMES, Flags, Floats, Levels, after, before, mean_range, rolling

MAX_LENGTH, MAX_NODES = 2_000, 400
"""Characters of an expression, and nodes of its tree with all definitions expanded."""
MAX_SPAN = 10_000
"""Bars of one window or shift."""
MAX_HORIZON = 1_000
"""Bars to come that an expression may read."""
PRICES = ("open", "high", "low", "close")
FUTURE = "future"
"""Before the name of a column: of the bars to come."""
SHOWN = "shown"
"""In place of a number of bars: all that the model is shown."""

Dimension = tuple[int, int, int]
"""Powers of price, volume and time."""
_PLAIN, _PRICE, _VOLUME, _TIME = (0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)
_WORDS = {_PLAIN: "a number", _PRICE: "a price", _VOLUME: "a volume", _TIME: "a time"}
_R_BARS = 20
_MINUTES = 24 * 60


class ExpressionError(ValueError):
    """An expression that cannot be evaluated; the message says what and where."""


@dataclass(frozen=True)
class Number:
    """Values [tapes, bars]; NaN where undefined."""

    values: Floats
    dimension: Dimension
    zero: bool = False
    """A literal 0, which has any dimension."""


@dataclass(frozen=True)
class Condition:
    """Truth [tapes, bars], the signed distance to the boundary, and where both are defined."""

    truth: Flags
    margin: Floats
    defined: Flags


Value = Number | Condition


@dataclass(frozen=True)
class Expression:
    """An expression that was read; ``lookback``: bars before the newest that it needs.

    ``horizon``: bars behind the newest that it needs; 0 where it reads none.
    """

    source: str
    tree: ast.expr
    lookback: int
    reads_time: bool
    horizon: int = 0

    def condition(self, levels: Levels) -> Condition:
        """Evaluate at every bar of every tape.

        Raises ExpressionError where it is a number, mixes dimensions, or needs more bars than are shown or
        times that these tapes do not have.
        """
        if levels.window and self.lookback >= levels.window:
            raise ExpressionError(
                f"{self.source!r} reads {self.lookback + 1} bars, but {levels.window} are shown"
            )
        value = _Evaluation(self.source, levels, self.horizon).of(self.tree, 0)
        if isinstance(value, Number):
            raise ExpressionError(f"{self.source!r} is {_word(value.dimension)}, but must be true or false")
        enough = np.arange(levels.close.shape[1]) >= self.lookback
        return Condition(value.truth, value.margin, value.defined & enough)


def parse(source: str, definitions: Mapping[str, str] | None = None, horizon: int = 0) -> Expression:
    """Read an expression. ``definitions``: names for expressions, each of which may use those before it.

    ``horizon``: bars to come that it may read. Raises ExpressionError for what the language does not have,
    and for a look ahead without a horizon.
    """
    known: dict[str, ast.expr] = {}
    for name, text in (definitions or {}).items():
        if not name.isidentifier() or name in _RESERVED:
            raise ExpressionError(f"{name!r} cannot be defined: it is no name, or one of the language's own")
        known[name] = _read(text, known)
    tree = _read(source, known)
    timed = any(isinstance(node, ast.Name) and node.id == "time" for node in ast.walk(tree))
    lookback, ahead = _lookback(source, tree), _reads_future(tree)
    _check_future(source, tree)
    if ahead and not horizon:
        raise ExpressionError(
            f"{source!r} looks ahead: it needs a horizon, the number of bars after which its label arrives"
        )
    return Expression(source, tree, lookback, timed, horizon if ahead else 0)


def _reads_future(tree: ast.AST) -> bool:
    return any(isinstance(node, ast.Attribute) for node in ast.walk(tree))


def _check_future(source: str, node: ast.AST, over: str = "", past: str = "") -> None:
    """Raise ExpressionError where a column of the future is in no function of it, or in one of the past.

    ``over``, ``past``: the call of each kind that ``node`` is in.
    """
    text = ast.unparse(node)[:80]
    match node:
        case ast.Attribute() if past:
            raise ExpressionError(f"{source!r}: {past} reads the past, so {text} cannot stand in it")
        case ast.Attribute() if not over:
            why = f"is a value for each bar to come: say which, such as last({text}) or highest({text})"
            raise ExpressionError(f"{source!r}: {text} {why}")
        case ast.Call() if _is_ahead(node):
            if over:
                raise ExpressionError(
                    f"{source!r}: {over} cannot contain {text}: both are over the bars to come"
                )
            over = text
        case ast.Subscript():
            past = past or text
        case ast.Call(func=ast.Name(id=name)) if name in _WINDOWS or name in _CROSSINGS:
            past = past or text
    for part in ast.iter_child_nodes(node):
        _check_future(source, part, over, past)


def _is_ahead(node: ast.Call) -> bool:
    """Whether it is a function over the bars to come."""
    return isinstance(node.func, ast.Name) and node.func.id in _AHEAD and len(node.args) == 1


def _read(source: str, known: Mapping[str, ast.expr]) -> ast.expr:
    if len(source) > MAX_LENGTH:
        raise ExpressionError(f"an expression has at most {MAX_LENGTH:,} characters, not {len(source):,}")
    try:
        tree = ast.parse(source.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        at = getattr(error, "offset", None)
        where = f" at character {at}" if at else ""
        raise ExpressionError(f"{source!r} cannot be read{where}: {getattr(error, 'msg', error)}") from error
    _check_size(source, tree)
    expanded: ast.expr = _Definitions(known).visit(tree)
    _check_size(source, expanded)
    return expanded


def _check_size(source: str, tree: ast.expr) -> None:
    if sum(1 for _ in ast.walk(tree)) > MAX_NODES:
        raise ExpressionError(f"{source[:80]!r} has more than {MAX_NODES} parts")


class _Definitions(ast.NodeTransformer):
    """Puts the defined expression in the place of each defined name."""

    def __init__(self, known: Mapping[str, ast.expr]) -> None:
        self._known = known

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._known.get(node.id, node)


def _lookback(source: str, node: ast.AST) -> int:
    """Bars before the newest that ``node`` needs. Raises ExpressionError as `parse`."""
    match node:
        case ast.Name(id=name):
            if name not in _NAMES:
                raise _unknown(source, name, _NAMES)
            return _R_BARS - 1 if name == "R" else 0
        case ast.Constant(value=value):
            if isinstance(value, bool) or not isinstance(value, int | float | str):
                raise ExpressionError(f"{source!r}: {ast.unparse(node)} is no number and no time")
            return 0
        case ast.Attribute(value=ast.Name(id=name), attr=column) if name == FUTURE:
            if column not in _COLUMNS:
                raise _unknown(source, f"{FUTURE}.{column}", [f"{FUTURE}.{each}" for each in _COLUMNS])
            return 0
        case ast.Subscript(value=inner, slice=index):
            return _bars(source, index, 0) + _lookback(source, inner)
        case ast.Call():
            return _call_lookback(source, node)
        case ast.BinOp(op=op) if type(op) in _ARITHMETIC:
            return max(_lookback(source, node.left), _lookback(source, node.right))
        case ast.UnaryOp(op=ast.USub() | ast.Not()):
            return _lookback(source, node.operand)
        case ast.BoolOp(values=parts):
            return max(_lookback(source, part) for part in parts)
        case ast.Compare(ops=ops) if all(type(op) in _COMPARED for op in ops):
            return max(_lookback(source, part) for part in (node.left, *node.comparators))
        case ast.Compare():
            raise ExpressionError(f"{source!r}: {ast.unparse(node)}: only <, <=, > and >= compare")
    raise ExpressionError(f"{source!r}: {ast.unparse(node)[:80]} is not part of the language")


def _call_lookback(source: str, node: ast.Call) -> int:
    """Bars before the newest that a call needs."""
    text = ast.unparse(node)[:80]
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name in _AHEAD and (name not in _FUNCTIONS or any(map(_reads_future, node.args))):
        if node.keywords or len(node.args) != 1 or not _reads_future(node):
            why = f"takes one argument with a column of the future, such as {FUTURE}.close"
            raise ExpressionError(f"{source!r}: {text}: over the bars to come, {name} {why}")
        return _lookback(source, node.args[0])
    if name not in _FUNCTIONS:
        raise _unknown(source, ast.unparse(node.func)[:40], [*_FUNCTIONS, *(_AHEAD - _WINDOWS)])
    if node.keywords or len(node.args) != _FUNCTIONS[name]:
        raise ExpressionError(f"{source!r}: {text}: {name} takes {_FUNCTIONS[name]} arguments")
    if name not in _WINDOWS:
        crossing = name in _CROSSINGS
        return max(_lookback(source, part) for part in node.args) + crossing
    inner = _lookback(source, node.args[0])
    if not _is_shown(node.args[1]):
        return inner + _bars(source, node.args[1], 1) - 1
    if any(_is_shown(part) for part in ast.walk(node.args[0])):
        raise ExpressionError(f"{source!r}: {text}: a window of all bars shown cannot contain another")
    return inner


def _bars(source: str, node: ast.AST, least: int) -> int:
    """A whole number of bars, written out."""
    match node:
        case ast.Constant(value=int(bars)) if not isinstance(bars, bool) and least <= bars <= MAX_SPAN:
            return bars
        case ast.UnaryOp(op=ast.USub()):
            raise ExpressionError(
                f"{source!r}: {ast.unparse(node)} bars ago looks ahead; write future.close, with a horizon"
            )
    raise ExpressionError(
        f"{source!r}: {ast.unparse(node)[:40]} must be a whole number of bars, {least} to {MAX_SPAN:,}"
    )


class _Evaluation:
    """Evaluates one expression on some tapes. ``back``: bars by which a value will be shifted later on.

    ``horizon``: bars to come that it reads; ``step``: which of them the columns of the future now are.
    """

    def __init__(self, source: str, levels: Levels, horizon: int, step: int = 0) -> None:
        self._source, self._levels = source, levels
        self._horizon, self._step = horizon, step
        self._unit = mean_range(levels)

    def of(self, node: ast.expr, back: int) -> Value:
        """The value of a node that `_lookback` has let pass."""
        match node:
            case ast.Name(id=name):
                return self._named(name)
            case ast.Constant(value=str(text)):
                return self._full(float(self._minute(text)), _TIME)
            case ast.Constant(value=value):
                return self._full(float(value), _PLAIN)  # type: ignore[arg-type]  # a number: `_lookback`
            case ast.Attribute(attr=column):
                now = self._named(column)
                return Number(after(now.values, self._step, np.nan), now.dimension)
            case ast.Subscript(value=inner, slice=ast.Constant(value=int(bars))):
                return self._shifted(self.of(inner, back + bars), bars)
            case ast.Call(func=ast.Name(id=name), args=arguments):
                return self._call(node, name, arguments, back)
            case ast.BinOp():
                return self._arithmetic(node, back)
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                number = self._number(inner, back)
                return Number(-number.values, number.dimension, number.zero)
            case ast.UnaryOp(operand=inner):
                flag = self._condition(inner, back)
                return Condition(~flag.truth, -flag.margin, flag.defined)
            case ast.BoolOp(op=op, values=parts):
                return _combined([self._condition(part, back) for part in parts], isinstance(op, ast.And))
        assert isinstance(node, ast.Compare), node
        sides = [self._number(part, back) for part in (node.left, *node.comparators)]
        pairs = zip(node.ops, sides, sides[1:], strict=False)
        return _combined([self._compared(node, op, a, b) for op, a, b in pairs], True)

    def _named(self, name: str) -> Number:
        x = self._levels
        if name in PRICES:
            price = 100 * x.percent[:, None] + getattr(x, name) - CENTRE
            return Number(price.astype(np.float64), _PRICE)
        if name == "volume":
            return Number(VOLUMES[x.volume], _VOLUME)
        if name == "R":
            return Number(self._unit, _PRICE)
        if x.minute is None:
            raise ExpressionError(f"{self._source!r} reads the time of day, which these bars do not show")
        return Number(np.broadcast_to(x.minute, x.close.shape).astype(np.float64), _TIME)

    def _full(self, value: float, dimension: Dimension) -> Number:
        return Number(np.full(self._levels.close.shape, value), dimension, zero=value == 0)

    def _minute(self, text: str) -> int:
        hours, _, minutes = text.partition(":")
        if len(text) == len("09:30") and hours.isdecimal() and minutes.isdecimal():
            minute = 60 * int(hours) + int(minutes)
            if int(minutes) < 60 and minute <= _MINUTES:
                return minute
        raise ExpressionError(f'{self._source!r}: {text!r} is no time of day, such as "09:30"')

    def _shifted(self, value: Value, bars: int) -> Value:
        if not bars:
            return value
        if isinstance(value, Number):
            return Number(before(value.values, bars, np.nan), value.dimension)
        earlier = before(value.margin, bars, 0.0)
        truth, defined = (
            before(each.astype(np.float64), bars, 0.0) > 0 for each in (value.truth, value.defined)
        )
        return Condition(truth, earlier, defined)

    def _call(self, node: ast.Call, name: str, arguments: list[ast.expr], back: int) -> Value:
        if _is_ahead(node):
            return self._over_future(name, arguments[0])
        if name in _WINDOWS:
            return self._window(name, arguments, back)
        if name in _CROSSINGS:
            return self._crossing(node, name, arguments, back)
        numbers = [self._number(argument, back) for argument in arguments]
        dimension = self._same(node, *numbers)
        if name == "abs":
            return Number(np.abs(numbers[0].values), dimension)
        if name == "sign":
            return Number(np.sign(numbers[0].values), _PLAIN)
        pick = np.maximum if name == "max" else np.minimum
        return Number(pick(numbers[0].values, numbers[1].values), dimension)

    def _crossing(self, node: ast.Call, name: str, arguments: list[ast.expr], back: int) -> Condition:
        """The first is on this side of the second now, and was not one bar before."""
        first, second = (self._number(argument, back + 1) for argument in arguments)
        above: ast.cmpop = ast.Gt() if name == "crossover" else ast.Lt()
        now = self._compared(node, above, first, second)
        earlier = self._shifted(now, 1)
        assert isinstance(earlier, Condition)
        return _combined([now, Condition(~earlier.truth, -earlier.margin, earlier.defined)], True)

    def _window(self, name: str, arguments: list[ast.expr], back: int) -> Value:
        """Over the last bars: a fixed number, or all that are shown and for which the argument is defined."""
        inner, length = arguments
        skipped = 0
        if _is_shown(length):
            skipped = _lookback(self._source, inner)
            bars = (self._levels.window or self._levels.close.shape[1]) - back - skipped
            if bars < 1:
                raise ExpressionError(f"{self._source!r} reads more bars than are shown")
        else:
            bars = _bars(self._source, length, 1)
        if name in ("any", "all", "count"):
            return self._of_conditions(name, self._condition(inner, back + bars - 1), bars, skipped)
        number = self._number(inner, back + bars - 1)
        return Number(_reduced(name, number.values, bars, skipped), number.dimension)

    def _over_future(self, name: str, inner: ast.expr) -> Value:
        """Over the bars to come, 1 to the horizon; undefined where one of them is not there."""
        first = self._horizon if name == "last" else 1
        steps = [
            _Evaluation(self._source, self._levels, self._horizon, step)
            for step in range(first, self._horizon + 1)
        ]
        if name == "last":
            return steps[0].of(inner, 0)
        if name in ("any", "all"):
            return _combined([each._condition(inner, 0) for each in steps], name == "all")
        if name in ("count", "until"):
            conditions = [each._condition(inner, 0) for each in steps]
            held = np.stack([each.truth for each in conditions])
            never = np.where(held.any(0), held.argmax(0), len(held)) + 1
            defined = np.logical_and.reduce([each.defined for each in conditions])
            return Number(np.where(defined, held.sum(0) if name == "count" else never, np.nan), _PLAIN)
        numbers = [each._number(inner, 0) for each in steps]
        values = np.stack([each.values for each in numbers])
        return Number(_REDUCED[name](values, axis=0), numbers[0].dimension)

    def _of_conditions(self, name: str, inner: Condition, bars: int, skipped: int) -> Value:
        early = np.arange(inner.truth.shape[1]) < skipped
        unknown = rolling((~inner.defined & ~early).astype(np.float64), bars, np.sum) > 0
        truth = (inner.truth & ~early).astype(np.float64)
        if name == "count":
            return Number(np.where(unknown, np.nan, rolling(truth, bars, np.sum)), _PLAIN)
        reduce, empty = (np.max, -np.inf) if name == "any" else (np.min, np.inf)
        margin = rolling(np.where(early, empty, inner.margin), bars, reduce)
        held = rolling(np.where(early, name == "all", inner.truth).astype(np.float64), bars, reduce) > 0
        return Condition(held, np.where(np.isfinite(margin), margin, 0.0), ~unknown)

    def _arithmetic(self, node: ast.BinOp, back: int) -> Number:
        a, b = self._number(node.left, back), self._number(node.right, back)
        if isinstance(node.op, ast.Add | ast.Sub):
            dimension = self._same(node, a, b)
        else:
            sign = -1 if isinstance(node.op, ast.Div) else 1
            p, v, t = (x + sign * y for x, y in zip(a.dimension, b.dimension, strict=True))
            dimension = (p, v, t)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            values = _ARITHMETIC[type(node.op)](a.values, b.values)
        return Number(np.where(np.isfinite(values), values, np.nan), dimension)

    def _compared(self, node: ast.AST, op: ast.cmpop, a: Number, b: Number) -> Condition:
        """The distance of prices is in R, of times in hours, of plain numbers as it is; else a log ratio."""
        dimension = self._same(node, a, b)
        truth: Flags = _COMPARED[type(op)](a.values, b.values)
        defined = ~(np.isnan(a.values) | np.isnan(b.values))
        difference = a.values - b.values
        if dimension == _PRICE:
            margin = difference / self._unit
        elif dimension in (_PLAIN, _TIME):
            margin = difference / (60 if dimension == _TIME else 1)
        else:
            same = (np.sign(a.values) == np.sign(b.values)) & (a.values != 0)
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = np.log(np.abs(a.values)) - np.log(np.abs(b.values))
                margin = np.where(same, np.sign(a.values) * ratio, 9.0 * np.sign(difference))
        margin = np.nan_to_num(np.clip(margin, -9.0, 9.0), nan=0.0)
        return Condition(truth & defined, margin if isinstance(op, ast.Gt | ast.GtE) else -margin, defined)

    def _same(self, node: ast.AST, *numbers: Number) -> Dimension:
        """The dimension of all ``numbers``; a literal 0 has any."""
        found = {number.dimension for number in numbers if not number.zero}
        if len(found) > 1:
            words = " and ".join(sorted(map(_word, found)))
            raise ExpressionError(f"{self._source!r}: {ast.unparse(node)[:80]} mixes {words}")
        return found.pop() if found else _PLAIN

    def _number(self, node: ast.expr, back: int) -> Number:
        value = self.of(node, back)
        if isinstance(value, Condition):
            raise ExpressionError(
                f"{self._source!r}: {ast.unparse(node)[:80]} is true or false, not a number"
            )
        return value

    def _condition(self, node: ast.expr, back: int) -> Condition:
        value = self.of(node, back)
        if isinstance(value, Number):
            raise ExpressionError(
                f"{self._source!r}: {ast.unparse(node)[:80]} is {_word(value.dimension)}, not true or false"
            )
        return value


def _reduced(name: str, values: Floats, bars: int, skipped: int) -> Floats:
    """``values`` [tapes, bars] reduced over the last ``bars``, without the first ``skipped`` of a tape."""
    kept = values.copy()
    kept[:, :skipped] = {"highest": -np.inf, "lowest": np.inf}.get(name, 0.0)
    unknown = rolling(np.isnan(kept).astype(np.float64), bars, np.sum) > 0
    kept = np.nan_to_num(kept, nan=0.0, posinf=np.inf, neginf=-np.inf)
    if name in ("highest", "lowest"):
        found = rolling(kept, bars, np.max if name == "highest" else np.min)
    else:
        there = np.clip(np.arange(values.shape[1]) + 1 - skipped, 1, bars)
        found = rolling(kept, bars, np.sum)
        if name == "mean":
            found = found / there
        if name == "stdev":  # around the tape's first value: sums of whole numbers are exact
            apart = kept - kept[:, skipped : skipped + 1]
            apart[:, :skipped] = 0.0
            total, squares = rolling(apart, bars, np.sum), rolling(apart**2, bars, np.sum)
            found = np.sqrt(np.maximum(there * squares - total**2, 0.0)) / there
    return np.where(unknown | ~np.isfinite(found), np.nan, found)


def _combined(parts: list[Condition], every: bool) -> Condition:
    """All of ``parts``, or any of them; undefined where one is."""
    pick: Any = np.minimum if every else np.maximum
    truth: Any = np.logical_and if every else np.logical_or
    return Condition(
        truth.reduce([part.truth for part in parts]),
        pick.reduce([part.margin for part in parts]),
        np.logical_and.reduce([part.defined for part in parts]),
    )


def _is_shown(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == SHOWN


def _word(dimension: Dimension) -> str:
    return _WORDS.get(dimension, "a product")


def _unknown(source: str, name: str, known: Iterable[str]) -> ExpressionError:
    return ExpressionError(f"{source!r}: there is no {name}, only {', '.join(sorted(known))}")


_ARITHMETIC: dict[type[ast.operator], Callable[[Floats, Floats], Floats]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], Flags]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_WINDOWS = frozenset({"highest", "lowest", "mean", "sum", "stdev", "count", "any", "all"})
_CROSSINGS = frozenset({"crossover", "crossunder"})
_REDUCED: dict[str, Callable[..., Floats]] = {
    "highest": np.max,
    "lowest": np.min,
    "mean": np.mean,
    "sum": np.sum,
    "stdev": np.std,
}
_AHEAD = _WINDOWS | {"last", "until"}
"""Functions over the bars to come, of one argument."""
_FUNCTIONS = dict.fromkeys(sorted(_WINDOWS), 2) | {
    "abs": 1,
    "sign": 1,
    "max": 2,
    "min": 2,
    "crossover": 2,
    "crossunder": 2,
}
"""Functions and how many arguments they take."""
_COLUMNS = (*PRICES, "volume")
_NAMES = dict.fromkeys((*_COLUMNS, "R", "time"), 0)
_RESERVED = {*_FUNCTIONS, *_AHEAD, *_NAMES, SHOWN, FUTURE}
