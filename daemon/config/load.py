"""Loads the settings: a TOML file, overridden by the environment, overridden by flags.

`FORETICK_TABLE__KEY=value` in the environment and `{"table.key": value}` from flags name the same keys as the
file; list elements are addressed by index (`FORETICK_SESSIONS__0__RETENTION_TOKENS`). `SCHEDULER_TYPE` names
the scheduler's policy as *Stream2LLM* does; our own variable overrides it. Every problem is a `ConfigError`
that names the key and, unless it came from the file, where its value came from.
"""

import os
import re
import tomllib
from ast import literal_eval
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from daemon.config.checks import cross_check
from daemon.config.errors import ConfigError, ConfigProblem
from daemon.config.former_keys import renamed_value
from daemon.config.overrides import Layered, bare, fields_of, no_such_key, type_at, words
from daemon.config.schema import PATTERNS, Config, SymbolsConfig, Table
from feeds.decimals import Fixed, parse_fixed
from feeds.decoding import shortened
from feeds.durations import Duration, parse_duration
from feeds.timestamps import Instant, parse_instant
from scheduler.policies import NAMES

__all__ = ["RESERVED_VARIABLES", "Config", "ConfigError", "ConfigProblem", "load_config", "load_table"]

T = TypeVar("T", bound=Table)

ENVIRONMENT_PREFIX = "FORETICK_"
# Variables with our prefix that are not settings: the cache directory, and the tests' data and broker.
RESERVED_VARIABLES = frozenset({"FORETICK_CACHE", "FORETICK_DATA", "FORETICK_KAFKA"})

SCHEDULER_TYPE = "SCHEDULER_TYPE"
POLICIES = {"DEFAULT_VLLM" if name == "vllm" else name.upper().replace("-", "_"): name for name in NAMES}
"""`DEFAULT_VLLM`, `FCFS`, `MCPS` and `LCAS` are *Stream2LLM*'s names; the others follow their style."""

_FINER_TIME = re.compile(r"^[^#\"'\n]*=\s*\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d\.\d{6}\d*[1-9]", re.MULTILINE)
"""A time that is no text, with digits that `tomllib` drops."""
_TABLE = re.compile(r"(sessions|patterns)\[\d+\]")
_PATTERN = re.compile(r"Expected `str` matching regex (.*)")
_SHOWN = 80
"""Characters of a value in a message."""
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")


def load_config(
    path: Path | str | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Config:
    """Read the file (None: only defaults), then the environment (None: this process's), then the overrides.

    Override values may be text, parsed as the key's type, or already of that type. Raises ConfigError: no
    such file, not TOML, an unknown key, a value of the wrong type or out of range, or contradictory settings
    (all contradictions at once).
    """
    layers = Layered(Config, read_toml(Path(path)) if path is not None else {})
    variables = os.environ if environment is None else environment
    if SCHEDULER_TYPE in variables:
        name = variables[SCHEDULER_TYPE]
        if name not in POLICIES:
            why = f"{SCHEDULER_TYPE} is {name!r} in the environment; known are {', '.join(POLICIES)}"
            raise ConfigError.of("scheduler.policy", why)
        layers.set("scheduler.policy", POLICIES[name], f"environment variable {SCHEDULER_TYPE}")
    for variable, text in sorted(variables.items()):
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in RESERVED_VARIABLES:
            key = variable.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            layers.set(key, text, origin=f"environment variable {variable}")
    for key, value in (overrides or {}).items():
        layers.set(key, value, origin="flag")
    values, places = _patterns_apart(layers.values)
    try:
        config = msgspec.convert(values, Config, dec_hook=_decode_unit)
    except msgspec.ValidationError as error:
        problem = _explain(str(error), Config, values, layers.origins)
        raise ConfigError([_at_home(problem, places)]) from None
    config = msgspec.structs.replace(config, symbols=_with_file(config.symbols))
    if problems := cross_check(config):
        raise ConfigError([_at_home(problem, places) for problem in problems])
    return config


def _with_file(symbols: SymbolsConfig) -> SymbolsConfig:
    """With the tables of its file, if it names one. Raises ConfigError."""
    if not symbols.file:
        return symbols
    key, tables = "symbols.file", ("alias", "continuous")
    if symbols.alias or symbols.continuous:
        raise ConfigError.of(key, "the file has symbols.alias and symbols.continuous: remove them here")
    try:
        values = read_toml(Path(symbols.file))
        if unknown := [name for name in values if name not in tables]:
            raise ConfigError.of(unknown[0], no_such_key(unknown[0], tables))
        found = load_table(SymbolsConfig, values)
    except ConfigError as error:
        found_in = [ConfigProblem(key, f"{symbols.file}: {each}") for each in error.problems]
        raise ConfigError(found_in) from None
    return msgspec.structs.replace(symbols, alias=found.alias, continuous=found.continuous)


def _patterns_apart(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The values with tables of `[[sessions]]` that have `match` as `patterns`; and where in the file each
    table of either list stands.
    """
    tables, places = values.get("sessions"), dict[str, str]()
    if not isinstance(tables, list):
        return dict(values), places
    found: dict[str, list[Any]] = {"sessions": [], "patterns": []}
    for index, table in enumerate(tables):
        kind = "patterns" if isinstance(table, dict) and "match" in table else "sessions"
        places[f"{kind}[{len(found[kind])}]"] = f"sessions[{index}]"
        found[kind].append(table)
    return {**values, **found}, places


def _at_home(problem: ConfigProblem, places: Mapping[str, str]) -> ConfigProblem:
    """With the keys that the file has."""
    key, text = (
        _TABLE.sub(lambda found: places.get(found[0], found[0]), each)
        for each in (problem.key, problem.message)
    )
    return ConfigProblem(key, text)


def load_table(kind: type[T], values: Mapping[str, object]) -> T:
    """One table of the file from values that may be text. Raises ConfigError, with keys of this table."""
    try:
        return msgspec.convert(values, kind, strict=False, dec_hook=_decode_unit)
    except msgspec.ValidationError as error:
        raise ConfigError([_explain(str(error), kind, values, {})]) from None


def read_toml(path: Path) -> dict[str, Any]:
    """The file's tables. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text)
    except OSError as error:
        raise ConfigError.of("", f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError.of("", f"{path} is not valid TOML: {error}") from None
    if found := _FINER_TIME.search(text):
        line = text.count("\n", 0, found.end()) + 1
        why = "times of TOML are read to the microsecond; write a finer one as text, in quotation marks"
        raise ConfigError.of("", f"{path}, line {line}: {why}")
    return values


def _decode_unit(kind: type, value: object) -> object:
    if kind is Duration:
        return parse_duration(value)
    if kind is Instant:
        return parse_instant(value)
    if kind is Fixed:  # exactly; text is read as a decimal number
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(f"expected a number, got {value!r}")
        return parse_fixed(str(value))
    raise NotImplementedError(f"no decoding is declared for {kind}")


def _explain(
    message: str, kind: type[Table], values: Mapping[str, object], origins: Mapping[str, str]
) -> ConfigProblem:
    """Turn "Expected `int`, got `str` - at `$.pool.blocks`" into the key and a message about it."""
    what, _, where = message.partition(" - at `$")
    key = where.removesuffix("`").removeprefix(".")
    steps = [step for step in re.split(r"[.\[\]]+", key) if step]
    if unknown := _UNKNOWN.fullmatch(what):
        key = f"{key}.{unknown[1]}" if key else unknown[1]
        what = no_such_key(key, fields_of(type_at(kind, steps)))
    elif what.startswith("Invalid enum value") and (allowed := _allowed(type_at(kind, steps))):
        value = _value_at(values, steps)
        given, renamed = shortened(repr(value), _SHOWN), renamed_value(key, value)
        what = f"must be {allowed}, not {given}{renamed}"
    elif pattern := _PATTERN.fullmatch(what):
        given = shortened(repr(_value_at(values, steps)), _SHOWN)
        wanted = PATTERNS.get(literal_eval(pattern[1]), f"text that matches {pattern[1]}")
        what = f"expected {wanted}, got {given}"
    origin = origins.get(key.replace("[", ".").replace("]", ""))
    return ConfigProblem(
        key, (what[:1].lower() + what[1:]).replace("`", "") + (f" (from {origin})" if origin else "")
    )


def _allowed(kind: inspect.Type) -> str:
    """What a key takes of which only some texts are allowed."""
    if named := words(kind):
        return f"a number or {' or '.join(named)}"
    found = bare(kind)
    values = found.values if isinstance(found, inspect.LiteralType) else ()
    return f"one of {', '.join(map(str, values))}" if values else ""


def _value_at(values: object, steps: Sequence[str]) -> object:
    for step in steps:
        if isinstance(values, Mapping):
            values = values.get(step)
        elif isinstance(values, Sequence) and not isinstance(values, str):
            values = values[int(step)]
    return values
