"""The members of one record declaration as values: names, numbers and times, exactly as a row says them."""

from collections.abc import Sequence
from dataclasses import dataclass

from feeds.codec import SIZES, YEAR_1990, YEAR_2100, MalformedRecord
from feeds.decimals import NANO, BinaryFloat, Fixed, fixed_of_float, multiplied, parse_fixed, round_fixed
from feeds.file_format import OPTIONAL, PRICES, FileFormat, RecordFormat, Ref, TimeFormat
from feeds.file_rows import Row
from feeds.number_texts import Plain, plain_numbers, shifted, shown
from feeds.timestamps import ParseTime, likely_unit
from feeds.wall_times import Moment

_SEQ_DIGITS = 20


@dataclass(frozen=True, slots=True)
class RowValues:
    """Reads the values of a declaration's rows. Every method raises MalformedRecord of what is unusable.

    ``plain``: None where numbers are decimal text as they stand. ``null``: words for no value.
    """

    form: RecordFormat
    plain: Plain | None
    null: frozenset[str]

    @classmethod
    def of(cls, form: FileFormat, record: RecordFormat) -> "RowValues":
        """Those of one declaration of a format."""
        return cls(record, plain_numbers(form.decimal, form.thousands), frozenset(form.null))

    def moment(self, row: Row, name: str, time: TimeFormat, parse: ParseTime) -> Moment:
        """The time that is declared as ``time``."""
        texts = [self.present(row, name, ref) for ref in time.refs]
        text = " ".join(texts)
        try:
            if isinstance(texts[0], BinaryFloat):
                text = str(self._of_float(name, texts[0]))
                texts = [text]
            plain = self.plain if time.counts else None
            moment = parse(text if plain is None else " ".join(map(plain, texts)))
        except (ValueError, OverflowError) as error:
            raise MalformedRecord("timestamp_unit", f"{name}: {error}") from None
        if not YEAR_1990 <= moment.ns < YEAR_2100 and (unit := likely_unit(text, YEAR_1990, YEAR_2100)):
            raise MalformedRecord(
                "timestamp_unit",
                f"{name}: {text[:100]} as {time.format} is not in the years 1990 to 2099; it looks "
                f"like {unit}: declare that as {name}.format",
            )
        return moment

    def number(self, row: Row, name: str) -> Fixed | None:
        """The number of a field; None where an optional one has none."""
        ref = self.form.fields[name]
        if self.null and name in OPTIONAL and self.says_none(row, ref):
            return None
        return self.number_at(row, name, ref)

    def number_at(self, row: Row, name: str, ref: Ref) -> Fixed:
        """The number that stands at ``ref``, read as that of a field is."""
        text = self.present(row, name, ref)
        try:
            return self.read_number(name, text)
        except ValueError as error:
            raise MalformedRecord("size" if name in SIZES else "price", f"{name}: {error}") from None

    def read_number(self, name: str, text: str) -> Fixed:
        """The number of a field from its text. Raises ValueError."""
        number, times = self._as_written(name, text), self.form.multiplier
        return multiplied(number, parse_fixed(times)) if times and name in SIZES else number

    def _as_written(self, name: str, text: str) -> Fixed:
        form = self.form
        if isinstance(text, BinaryFloat):
            return self._of_float(name, text)
        if self.plain is not None:
            text = self.plain(text)
        if form.implied_decimals and name in PRICES:
            text = shifted(text, form.implied_decimals)
        return round_fixed(text, NANO) if name in form.rounded else parse_fixed(text)

    def _of_float(self, name: str, text: BinaryFloat) -> Fixed:
        decimals = self.form.float_decimals.get(name)
        if decimals is None:
            raise ValueError(f"{text} is a binary float: declare float_decimals.{name}")
        return fixed_of_float(text, decimals, rounded=name in self.form.rounded)

    def side(self, row: Row) -> str:
        """Whose side a trade's aggressor was on."""
        ref = self.form.fields.get("side")
        if ref is None or (self.null and self.says_none(row, ref)):
            return "unknown"
        text = self.present(row, "side", ref)
        side = self.form.side_values.get(text)
        if side is None:
            raise MalformedRecord("type", f"side: {shown(text)} is not among side_values")
        return side

    def name(self, row: Row, name: str, constant: str) -> str:
        """A name at its field, or else the constant one."""
        ref = self.form.fields.get(name)
        return constant if ref is None else str(self.present(row, name, ref))

    def optional(self, row: Row, name: str) -> str:
        """The text of a field that a record may lack; empty where it does."""
        ref = self.form.fields.get(name)
        value = None if ref is None else row.get(ref)
        return "" if value is None or value in self.null else str(value)

    def seq(self, row: Row) -> int:
        """The venue's number of the record."""
        text = self.present(row, "seq", self.form.fields["seq"])
        if not (text.isascii() and text.isdecimal() and len(text) <= _SEQ_DIGITS):
            raise MalformedRecord("type", f"seq: {shown(text)} is not a number of 64 bits")
        return int(text)

    def lacks(self, row: Row, refs: Sequence[Ref]) -> bool:
        """Whether nothing stands at any of these places, or a word for no value."""
        return all((value := row.get(ref)) is None or value in self.null for ref in refs)

    def says_none(self, row: Row, ref: Ref) -> bool:
        """Whether a word for no value stands there, or JSON's null; not if nothing does."""
        value = row.get(ref)
        return row.is_null(ref) if value is None else value in self.null

    def present(self, row: Row, name: str, ref: Ref) -> str:
        """The text at a place that has one."""
        value = row.get(ref)
        if value is None or value in self.null:
            raise MalformedRecord("missing_field", f"{name}: nothing at {ref!r}")
        return value
