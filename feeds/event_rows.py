"""The members of events, records that are in no bar, as a declaration says where a row has them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from feeds.codec import MAX_LEVELS, MalformedRecord
from feeds.decimals import Fixed
from feeds.file_format import FileFormat, RecordFormat
from feeds.file_rows import Row
from feeds.market_data import ABOUT
from feeds.number_texts import shown
from feeds.row_values import RowValues
from feeds.timestamps import ParseTime

Word = TypeVar("Word", bound=str)


@dataclass(frozen=True, slots=True)
class EventReader:
    """Reads what only events have; ``effective`` parses the time at which an action takes effect."""

    values: RowValues
    effective: ParseTime | None

    @classmethod
    def of(cls, form: FileFormat, record: RecordFormat) -> "EventReader":
        """That of one declaration. Raises ValueError: an unusable one."""
        parse = None if record.effective is None else record.effective.parser(None, whole_days=True)
        return cls(RowValues.of(form, record), parse)

    def members(self, row: Row) -> dict[str, Any]:
        """The members of the record, but venue, symbol, times and number. Raises MalformedRecord."""
        values, form = self.values, self.values.form
        match form.kind:
            case "text":
                text = values.present(row, "text", form.fields["text"])
                return {"text": str(text), "id": values.optional(row, "id")}
            case "status":
                state = self._one_of(row, "state", form.state, form.state_values)
                return {"state": state, "reason": values.optional(row, "reason")}
            case "action":
                return self._action(row)
        return {side: self._levels(row, side) for side in ("bids", "asks")}

    def _action(self, row: Row) -> dict[str, Any]:
        """What its kind of action needs; a row may have more."""
        values, form = self.values, self.values.form
        action = self._one_of(row, "action", form.action, form.action_values)
        found: dict[str, Any] = {"action": action}
        name = ABOUT[action]
        if name not in form.fields:
            raise MalformedRecord("missing_field", f"a {action} needs fields.{name}")
        found[name] = values.name(row, name, "") if name == "new_symbol" else values.number(row, name)
        time = form.effective
        if time is not None and self.effective is not None and not values.lacks(row, time.refs):
            found["effective"] = values.moment(row, "effective", time, self.effective).ns
        return found

    def _one_of(self, row: Row, name: str, constant: Word | Literal[""], words: Mapping[str, Word]) -> Word:
        """The state or action that a row names, in the format's words."""
        if constant:
            return constant
        text = self.values.present(row, name, self.values.form.fields[name])
        if text not in words:
            raise MalformedRecord("type", f"{name}: {shown(text)} is not among {name}_values")
        return words[text]

    def _levels(self, row: Row, side: str) -> list[tuple[Fixed, Fixed]]:
        """The best levels of a side, of which there may be more."""
        values, at = self.values, self.values.form.levels
        if side not in values.form.fields:
            return []
        levels = row.elements(str(values.form.fields[side]), side)[:MAX_LEVELS]
        return [
            (values.number_at(each, "price", at.price), values.number_at(each, "size", at.size))
            for each in levels
        ]
