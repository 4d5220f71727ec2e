"""Payloads of Protobuf as documents, by protobuf; schemas of a registry are compiled by protoc."""

from __future__ import annotations

import base64
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from google.protobuf import (
    any_pb2,
    descriptor_pb2,
    descriptor_pool,
    duration_pb2,
    empty_pb2,
    message_factory,
    struct_pb2,
    timestamp_pb2,
    wrappers_pb2,
)
from google.protobuf.message import DecodeError, Message

from feeds.codec import MalformedRecord
from feeds.columns.places import Integers, Places, Scanned
from feeds.columns.protobuf_scanner import ProtobufPlan
from feeds.file_format import FileFormat, FormatError
from feeds.number_texts import JsonNumber
from feeds.payloads.protobuf_plan import TIMESTAMP, compile_plan
from feeds.payloads.schema_registry import Schema, SchemaRegistry, split

# the default pool has what was imported
_WELL_KNOWN = (any_pb2, duration_pb2, empty_pb2, struct_pb2, timestamp_pb2, wrappers_pb2)
_MAX_INDEXES = 64
"""Of a message within messages."""


class ProtobufDocuments:
    """``registry``: tells the schema that a payload is written in; without one it is the format's own."""

    def __init__(self, form: FileFormat, registry: SchemaRegistry | None) -> None:
        """Raises FormatError."""
        self._own = _own(form) if form.schema else None
        self._registry = registry
        self._pools: dict[int, _Pool] = {}
        self._kinds: dict[tuple[int, tuple[int, ...] | str], type[Message]] = {}
        self._plans: dict[type[Message], ProtobufPlan | None] = {}
        if registry is None and self._own is None:
            raise FormatError("container protobuf: declare schema and message, or configure a registry")

    def document(self, payload: bytes) -> Any:
        """The message of a payload, as a document. Raises MalformedRecord."""
        kind, data = self._opened(payload)
        message = kind()
        try:
            message.ParseFromString(data)
        except DecodeError as error:
            what = f"the payload is no {kind.DESCRIPTOR.full_name}: {error}"
            raise MalformedRecord("protobuf", what) from None
        return _document(message)

    def scan(self, raw: bytes, ends: Integers, places: Places) -> Scanned | None:
        """See `Documents`: all that have the head of the first one."""
        first = raw[: ends[ends.searchsorted(0, "right")]]
        try:
            kind, data = self._opened(first)
        except MalformedRecord:
            return None
        if kind not in self._plans:
            self._plans[kind] = compile_plan(kind.DESCRIPTOR, places)
        plan = self._plans[kind]
        return None if plan is None else plan.scan(raw, ends, first[: len(first) - len(data)])

    def _opened(self, payload: bytes) -> tuple[type[Message], bytes]:
        """The class of a payload's message, and its bytes. Raises MalformedRecord."""
        number, data = split(payload)
        if number is None:
            if self._own is None:
                raise MalformedRecord("framing", "no schema id of a registry is in front")
            return self._own, data
        name, rest = _message_name(data)
        if name and (kind := self._kind(number, name)) is not None:
            return kind, rest
        if name and self._own is not None:
            raise MalformedRecord("schema", f"the message is {name}, not {self._own.DESCRIPTOR.name}")
        path, data = _message_path(data)
        kind = self._kind(number, path)
        if kind is None:
            where = ".".join(map(str, path))
            raise MalformedRecord("schema", f"the schema {number} has no message {where}")
        return kind, data

    def _kind(self, number: int, place: tuple[int, ...] | str) -> type[Message] | None:
        """The class of a schema's message, by its place or name; None where it has none there.

        Raises MalformedRecord.
        """
        if self._own is not None:
            return self._own if isinstance(place, tuple) or place == self._own.DESCRIPTOR.name else None
        found = self._kinds.get((number, place))
        if found is None and (found := self._pool(number).at(place)) is not None:
            self._kinds[number, place] = found
        return found

    def _pool(self, number: int) -> _Pool:
        """The descriptors of a schema. Raises MalformedRecord."""
        if (found := self._pools.get(number)) is None:
            assert self._registry is not None
            schema = self._registry.get(number)
            if schema.kind != "PROTOBUF":
                raise MalformedRecord("schema", f"the schema {number} is {schema.kind}, not Protobuf")
            try:
                found = self._pools[number] = compiled(schema)
            except FormatError as error:
                raise MalformedRecord("schema", f"the schema {number} cannot be used: {error}") from None
        return found


def _own(form: FileFormat) -> type[Message]:
    try:
        files = descriptor_pb2.FileDescriptorSet.FromString(Path(form.schema).read_bytes())
        return _Pool(files).kind(form.message)
    except (OSError, DecodeError, KeyError, TypeError) as error:
        raise FormatError(f"schema {form.schema}, message {form.message}: {error!r}") from error


class _Pool:
    """Descriptors. ``first``: the file whose messages payloads name by number. ``serialized``: all files."""

    def __init__(self, files: descriptor_pb2.FileDescriptorSet) -> None:
        """Raises TypeError: they make no sense."""
        self._pool = descriptor_pool.DescriptorPool()
        for each in files.file:
            self._pool.Add(each)
        self.first, self.serialized = files.file[-1], files.SerializeToString()

    def kind(self, name: str) -> type[Message]:
        """The class of a message. Raises KeyError."""
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(name))

    def at(self, place: tuple[int, ...] | str) -> type[Message] | None:
        """The message at this place, or of this name, in the first file; None where there is none."""
        kinds, names = self.first.message_type, [self.first.package] if self.first.package else []
        if isinstance(place, str):
            return self.kind(".".join([*names, place])) if place in [each.name for each in kinds] else None
        for index in place or (0,):
            if index >= len(kinds):
                return None
            names.append(kinds[index].name)
            kinds = kinds[index].nested_type
        return self.kind(".".join(names))


def compiled(schema: Schema) -> _Pool:
    """The descriptors of a schema: in Protobuf's language, or already compiled. Raises FormatError."""
    found = descriptor_pb2.FileDescriptorSet()
    try:
        if (file := _descriptor(schema)) is not None:
            _add_all(found, file, schema, set())
        else:
            found = _by_protoc(schema)
        return _Pool(found)
    except (TypeError, KeyError) as error:  # of descriptors that make no sense
        raise FormatError(f"{error}") from error


def _descriptor(schema: Schema) -> descriptor_pb2.FileDescriptorProto | None:
    """A schema as confluent-kafka's serializer in Python registers it; None of one in Protobuf's language."""
    try:
        return descriptor_pb2.FileDescriptorProto.FromString(base64.b64decode(schema.text, validate=True))
    except (ValueError, DecodeError):
        return None


def _add_all(
    found: descriptor_pb2.FileDescriptorSet,
    file: descriptor_pb2.FileDescriptorProto,
    schema: Schema | None,
    known: set[str],
) -> None:
    """A file behind all that it imports: from the registry, or of Protobuf's own."""
    for name in file.dependency:
        if name in known:
            continue
        known.add(name)
        of_registry = None if schema is None else schema.references.get(name)
        imported = None if of_registry is None else _descriptor(of_registry)
        if imported is None:
            imported = descriptor_pb2.FileDescriptorProto()
            descriptor_pool.Default().FindFileByName(name).CopyToProto(imported)
        imported.name = name
        _add_all(found, imported, of_registry, known)
    found.file.append(file)


def _by_protoc(schema: Schema) -> descriptor_pb2.FileDescriptorSet:
    try:
        import grpc_tools  # type: ignore[import-untyped]  # it has no types
        from grpc_tools import protoc
    except ImportError as error:
        raise FormatError(f"it needs protoc: pip install 'foretick[protobuf]' ({error})") from error
    with tempfile.TemporaryDirectory() as folder:
        root, name = Path(folder), "schema.proto"
        _write(root, name, schema)
        out = root / "descriptors"
        places = [f"-I{root}", f"-I{Path(grpc_tools.__file__).parent / '_proto'}"]
        if protoc.main(["", *places, "--include_imports", f"--descriptor_set_out={out}", name]):
            raise FormatError("protoc refuses it")
        return descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())


def _write(root: Path, name: str, schema: Schema) -> None:
    """A schema and all that it imports, each in its file."""
    path = (root / name).resolve()
    if not path.is_relative_to(root.resolve()):
        raise FormatError(f"it imports {name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(schema.text)
    for imported, each in schema.references.items():
        _write(root, imported, each)


def _message_name(data: bytes) -> tuple[str, bytes]:
    """The name of the message, as Apicurio's serializers write it in front, and the rest; "" where none is.

    It is the member 1 of a message of Protobuf, with the size of that in front.
    """
    size = data[0] if data else 0
    if not 2 < size < 0x80 or data[1:3] != bytes([0x0A, size - 2]) or len(data) <= size:
        return "", data
    name = data[3 : size + 1]
    return (name.decode(), data[size + 1 :]) if name.isascii() else ("", data)


def _message_path(data: bytes) -> tuple[tuple[int, ...], bytes]:
    """The place of the message in its schema, as a registry's serializers write it in front of a payload."""
    count, at = _zigzag(data, 0)
    if count == 0:
        return (0,), data[at:]
    if not 0 < count <= _MAX_INDEXES:
        raise MalformedRecord("framing", f"a message within {count} messages")
    path = []
    for _ in range(count):
        index, at = _zigzag(data, at)
        if index < 0:
            raise MalformedRecord("framing", f"a message with the number {index}")
        path.append(index)
    return tuple(path), data[at:]


def _zigzag(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), at
    raise MalformedRecord("framing", "the place of the message is cut off")


def _document(message: Message) -> dict[str, Any]:
    """Set members by name; members without presence are there with their default, as Protobuf 3 says."""
    plain, others = _members(message.DESCRIPTOR)
    found = {name: getattr(message, name) for name in plain}
    for each in others:
        value = getattr(message, each.name)
        if each.is_repeated:
            found[each.name] = _map(each, value) if _is_map(each) else [_value(each, one) for one in value]
        elif not each.has_presence or message.HasField(each.name):
            found[each.name] = _value(each, value)
    return found


@lru_cache(maxsize=1024)
def _members(descriptor: Any) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """The names of a message's numbers and texts that are always there, and its other members."""
    plain, others = list[Any](), list[Any]()
    for each in descriptor.fields:
        is_plain = not each.is_repeated and not each.has_presence and each.enum_type is None
        (plain if is_plain and each.message_type is None else others).append(each)
    return tuple(each.name for each in plain), tuple(others)


def _is_map(field: Any) -> bool:
    """Protobuf's fields have no type that both of its implementations share."""
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _map(field: Any, value: Any) -> dict[str, Any]:
    of = field.message_type.fields_by_name["value"]
    return {str(key): _value(of, one) for key, one in value.items()}


def _value(field: Any, value: Any) -> Any:
    """A time becomes decimal text of seconds since 1970, an enumeration the name of its value."""
    if field.message_type is not None:
        if field.message_type.full_name == TIMESTAMP:
            return JsonNumber(f"{value.seconds}.{value.nanos:09d}")
        return _document(value)
    if field.enum_type is not None:
        named = field.enum_type.values_by_number.get(value)
        return value if named is None else named.name
    return value
