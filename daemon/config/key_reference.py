"""Renders `docs/configuration.md` from the schema: run `python -m daemon.config.key_reference > FILE`."""

import inspect as python_inspect
import json
from collections.abc import Iterator
from typing import cast

import msgspec
from msgspec import inspect

from daemon.config.derived_limits import DerivedLimits, rules
from daemon.config.load import POLICIES
from daemon.config.overrides import bare, words
from daemon.config.schema import Config, ModelConfig, NamedModel, PatternConfig, SessionSettings
from daemon.config.tenants_file import TenantTable
from feeds.decimals import Fixed

_HEAD = """\
# Configuration

The configuration is one TOML file. A key may also be set in the environment, as `FORETICK_TABLE__KEY`
(`FORETICK_POOL__BLOCKS=4096`, `FORETICK_SESSIONS__0__RETENTION_TOKENS=2048`), or by the flag
`--set table.key=value`. Flags override the environment, the environment overrides the file, and the file
overrides the defaults. An unknown key is an error wherever it is written. `foretick check --config FILE`
names the keys that are wrong.

Durations are text: `250ms`, `1s`, `1.5s`, `1m`, `2h`. Times are ISO 8601 with a zone: `2024-08-08T23:54:15Z`.
The tests read `FORETICK_DATA` and `FORETICK_KAFKA`; these are not settings.

`SCHEDULER_TYPE` in the environment sets `scheduler.policy`: POLICIES.
`FORETICK_SCHEDULER__POLICY` overrides it.

`python -m daemon.config.key_reference` renders this page from `daemon/config/schema.py` and the modules of
`feeds/connectors/`. Do not edit it. The [glossary](glossary.md) defines the terms.
""".replace("POLICIES", ", ".join(f"`{name}`" for name in POLICIES))
_TENANTS = """\
## The tenants file

A file of its own, named by `tenants.file`. See [tenants](tenants.md).
"""
_LIMITS = """\
## Limits that follow

They have no key of their own: each is another key times a factor, rounded down, and at least what it is with
that key's default. `foretick check` says what they are.

| limit | key | factor | with its default |
|---|---|---|---|
"""
_COLUMNS = "| key | type | default | meaning |\n|---|---|---|---|"


def configuration_reference() -> str:
    """The whole page as markdown, ending in one newline."""
    tenants = _TENANTS, *_tables("tenants", TenantTable, True)
    return "\n".join([_HEAD, *_tables("", Config), *tenants, _LIMITS + "".join(_limits())])


def _limits() -> Iterator[str]:
    limits = DerivedLimits.of(Config())
    for name, rule in rules():
        yield f"| {rule.about} | `{rule.key}` | {rule.factor} | {getattr(limits, name):,} |\n"


def _tables(path: str, struct: type[msgspec.Struct], is_list: bool = False) -> Iterator[str]:
    """The struct's own heading and table, then those of the structs inside it."""
    fields = cast(inspect.StructType, inspect.type_info(struct)).fields
    if struct is PatternConfig:  # it stands in the same list as others
        path, fields = "sessions", tuple(f for f in fields if f.name not in SessionSettings.__struct_fields__)
    if struct is NamedModel:
        same = set(ModelConfig.__struct_fields__) - {"name"}
        fields = tuple(f for f in fields if f.name not in same)
    tables = [field for field in fields if _table(field.type) is not None]
    keys = [field for field in fields if field not in tables]
    with_match = " with `match`" if struct is PatternConfig else ""
    heading = f"`[[{path}]]`{with_match}" if is_list else f"`[{path}]`" if path else "At the top of the file"
    about = "" if not path else f"{python_inspect.cleandoc(struct.__doc__ or '')}\n\n"
    if keys:
        yield f"## {heading}\n\n{about}{_COLUMNS}\n" + "\n".join(map(_row, keys)) + "\n"
    for field in tables:
        inner, many = _table(field.type) or (struct, False)
        yield from _tables(f"{path}.{field.encode_name}" if path else field.encode_name, inner, many)


def _table(kind: inspect.Type) -> tuple[type[msgspec.Struct], bool] | None:
    """The struct a field contains, and whether it is a list of them; None for a plain key."""
    kind = bare(kind)
    many = isinstance(kind, inspect.VarTupleType)
    if isinstance(kind, inspect.VarTupleType):
        kind = bare(kind.item_type)
    return (kind.cls, many) if isinstance(kind, inspect.StructType) else None


def _row(field: inspect.Field) -> str:
    meaning = description(field.type).replace("|", "\\|")
    if not meaning:
        raise TypeError(f"the configuration key {field.encode_name} has no description")
    return f"| `{field.encode_name}` | {_type(field.type)} | {_default(field)} | {meaning} |"


def description(kind: inspect.Type) -> str:
    """What a key means; empty without a description."""
    if isinstance(kind, inspect.Metadata):
        return str((kind.extra_json_schema or {}).get("description", ""))
    return ""


def _type(kind: inspect.Type) -> str:
    named = [f"`{word}`" for word in words(kind)]
    if named:
        return " \\| ".join([*named, _type(bare(kind))])
    kind = bare(kind)
    if isinstance(kind, inspect.LiteralType):
        return " \\| ".join(f"`{value}`" for value in kind.values)
    if isinstance(kind, inspect.VarTupleType):
        return f"list of {_type(kind.item_type)}"
    if isinstance(kind, inspect.CustomType):
        return {"Duration": "duration", "Instant": "time", "Fixed": "number"}[kind.cls.__name__]
    names = {inspect.StrType: "text", inspect.IntType: "integer", inspect.FloatType: "number"}
    return names.get(type(kind), "true or false") + _bounds(kind)


def _bounds(kind: inspect.Type) -> str:
    signs = (("gt", "> "), ("ge", ">= "), ("lt", "< "), ("le", "<= "))
    found = [f"{sign}{getattr(kind, name)}" for name, sign in signs if getattr(kind, name, None) is not None]
    return " " + " and ".join(found) if found else ""


def _default(field: inspect.Field) -> str:
    if field.required:
        return "required"
    if field.default is None:
        return "none"
    if isinstance(bare(field.type), inspect.CustomType):
        return f"`{field.default}`" if isinstance(field.default, Fixed) else f'`"{field.default}"`'
    return f"`{json.dumps(field.default)}`"


if __name__ == "__main__":
    print(configuration_reference(), end="")
