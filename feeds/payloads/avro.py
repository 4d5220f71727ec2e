"""Payloads of Avro as documents, by fastavro."""

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastavro import parse_schema, schemaless_reader

from feeds.codec import MalformedRecord
from feeds.columns.places import Integers, Places
from feeds.file_format import FileFormat, FormatError
from feeds.payloads.schema_registry import Schema, SchemaRegistry, split


class AvroDocuments:
    """``registry``: tells the schema that a payload is written in; without one it is the format's own.

    With both, what is read is resolved to the format's own schema, with its defaults and aliases.
    """

    def __init__(self, form: FileFormat, registry: SchemaRegistry | None) -> None:
        """Raises FormatError."""
        self._registry, self._own = registry, _own(form)
        self._parsed: dict[int, Any] = {}
        if registry is None and self._own is None:
            raise FormatError("container avro: declare schema, or configure a registry")

    def document(self, payload: bytes) -> Any:
        """The value of a payload. Raises MalformedRecord."""
        number, data = split(payload)
        if self._registry is None:
            if number is not None:
                what = f"schema id {number} of a registry is in front, and none is configured"
                raise MalformedRecord("framing", what)
            return _read(data, self._own, None)
        if number is None:
            raise MalformedRecord("framing", "no schema id of a registry is in front")
        return _read(data, self._writer(self._registry.get(number), number), self._own)

    def scan(self, _raw: bytes, _ends: Integers, _places: Places) -> None:
        """See `Documents`: no payload is read so."""

    def _writer(self, schema: Schema, number: int) -> Any:
        if number not in self._parsed:
            if schema.kind != "AVRO":
                raise MalformedRecord("schema", f"the schema {number} is {schema.kind}, not Avro")
            named: dict[str, Any] = {}
            try:
                self._parsed[number] = _parsed(schema, named)
            except Exception as error:  # fastavro raises what a schema provokes
                raise MalformedRecord("schema", f"the schema {number} cannot be used: {error!r}") from None
        return self._parsed[number]


def _read(data: bytes, writer: Any, reader: Any) -> Any:
    stream = io.BytesIO(data)
    try:
        found = schemaless_reader(stream, writer, reader)
    except Exception as error:  # as above
        raise MalformedRecord("avro", f"the payload is not of its schema: {error!r}") from None
    if rest := len(data) - stream.tell():
        raise MalformedRecord("avro", f"{rest} bytes are behind the record: it is of another schema")
    return found


def _parsed(schema: Schema, named: dict[str, Any]) -> Any:
    for each in schema.references.values():
        _parsed(each, named)
    return parse_schema(_without_times(json.loads(schema.text)), named_schemas=named)


def _own(form: FileFormat) -> Any:
    if not form.schema:
        return None
    try:
        return _parsed(Schema("AVRO", Path(form.schema).read_text()), {})
    except Exception as error:
        raise FormatError(f"schema {form.schema}: {error!r}") from error


def _without_times(schema: Any) -> Any:
    """The schema in which times, dates and UUIDs are what is written, so that no digit of them is lost."""
    if isinstance(schema, list):
        return [_without_times(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = {k: v for k, v in schema.items() if k != "logicalType" or v == "decimal"}
    for key in ("type", "items", "values", "fields"):
        if key in kept:
            kept[key] = _without_times(kept[key])
    return kept
