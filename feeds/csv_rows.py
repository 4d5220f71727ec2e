"""The cells of csv lines, and their header held against what a format declares."""

import csv
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from feeds.codec import MalformedRecord
from feeds.file_format import FileFormat, FormatError, Ref
from feeds.number_texts import shown
from feeds.text_lines import Line, Refuse

Notice = Callable[[str], object]
"""Called with what is worth saying of a whole file."""

_QUOTE = '"'
_DELIMITERS = {",": "','", ";": "';'", "\t": r"'\t'", "|": "'|'"}
_SEARCHED = 64
"""Lines behind a wrong header in which the right one is looked for."""
_OPEN = "unexpected end of data"
"""What csv's strict reader says of a quotation mark that is still open."""


@dataclass(frozen=True, slots=True)
class _Cells:
    """The cells of a row, where it begins; ``columns``: their places by name. See `feeds.file_rows.Row`."""

    line: int
    cells: list[str]
    columns: dict[str, int]
    received = 0

    @property
    def width(self) -> int:
        return 0 if self.columns else len(self.cells)

    def get(self, ref: Ref) -> str | None:
        index = self.columns.get(ref) if isinstance(ref, str) else ref
        return self.cells[index].strip() if index is not None and index < len(self.cells) else None

    def is_null(self, ref: Ref) -> bool:
        return False

    def elements(self, ref: str, of: str = "") -> Sequence["_Cells"]:
        raise MalformedRecord("type", f"a csv line has no array {ref}")


class CsvRows:
    """Rows of a csv text, behind its header.

    ``columns``: places of the header's columns by name; empty without a header. ``width``: cells of a row; 0
    where any number goes. A quoted field extends over ``max_field_lines`` lines: where a quotation mark stays
    open for longer, its line alone is malformed, and reading goes on at the next one.

    Raises:
        FormatError: the header is not what the format declares.
    """

    def __init__(self, lines: Iterator[Line], form: FileFormat, refuse: Refuse, notice: Notice) -> None:
        self._lines, self._form, self._refuse = lines, form, refuse
        self._waiting: deque[Line] = deque()
        self.columns: dict[str, int] = {}
        self.width = 0
        if form.header:
            self._read_header(notice)

    def __iter__(self) -> Iterator[_Cells]:
        rows = self._rows()
        first = next(rows, None)
        if first is None:
            return
        if self.width and len(first.cells) == self.width + 1 and not first.cells[-1].strip():
            self.width += 1  # every row ends with a delimiter, and the header does not
        for row in chain([first], rows):
            if self.width and len(row.cells) != self.width:
                text = self._form.delimiter.join(row.cells)
                message = f"{len(row.cells)} cells where the header has {len(self.columns)}: {shown(text)}"
                self._refuse(row.line, MalformedRecord("type", message))
            else:
                yield row

    def _rows(self) -> Iterator[_Cells]:
        while (line := self._next()) is not None:
            number, text = line
            if text.isspace() and self._form.delimiter not in text:
                continue
            try:
                yield _Cells(number, self._cells(line), self.columns)
            except csv.Error as error:
                what = self._unclosed if _OPEN in str(error) else f"no csv row: {error}"
                self._refuse(number, MalformedRecord("type", f"{what}: {shown(text.rstrip())}"))

    @property
    def _unclosed(self) -> str:
        return f"a quotation mark is not closed within max_field_lines = {self._form.max_field_lines}"

    def _next(self) -> Line | None:
        return self._waiting.popleft() if self._waiting else next(self._lines, None)

    def _cells(self, line: Line) -> list[str]:
        """The cells of a row that begins with this line. Raises csv.Error."""
        text = line[1]
        if _QUOTE not in text:
            return text.rstrip("\r\n").split(self._form.delimiter)
        try:
            return self._parsed(text)
        except csv.Error as error:
            if _OPEN not in str(error) or self._form.max_field_lines < 2:
                raise
            return self._over_lines(text, error)

    def _over_lines(self, text: str, error: csv.Error) -> list[str]:
        """The cells of a row with a line end inside a field; lines that are none of it wait to be read."""
        taken: list[Line] = []
        while len(taken) < self._form.max_field_lines - 1 and (more := self._next()) is not None:
            taken.append(more)
            text += more[1]
            try:
                cells = self._parsed(text)
            except csv.Error as still:
                if _OPEN in str(still):
                    continue
                break
            if self.width and len(cells) not in (self.width, self.width + 1):
                break
            return cells
        self._waiting.extendleft(reversed(taken))
        raise error

    def _parsed(self, text: str) -> list[str]:
        reader = csv.reader([text], delimiter=self._form.delimiter, strict=True)
        return next(reader, [])

    def _read_header(self, notice: Notice) -> None:
        form = self._form
        refuse, self._refuse = self._refuse, _wrong_header
        header = next(self._rows(), None)
        self._refuse = refuse
        if header is None:
            notice("there is no header: the file is empty")
            return
        names = [name.strip() for name in header.cells]
        used = {ref for ref in form.columns() if isinstance(ref, str)}
        twice = sorted(name for name in used if names.count(name) > 1)
        if twice:
            raise FormatError(f"the header (line {header.line}) has {_columns('two', twice)}")
        missing = sorted(used - set(names))
        if missing:
            hint = self._hint(header, used)
            raise FormatError(
                f"the header (line {header.line}) has {_columns('no', missing)}, which the format declares; "
                f"it has {_listed(names)}{hint}"
            )
        beyond = [ref for ref in form.columns() if isinstance(ref, int) and ref >= len(names)]
        if beyond:
            raise FormatError(
                f"the header (line {header.line}) has {len(names)} columns, so none {min(beyond)}"
            )
        extra = [
            name for at, name in enumerate(names) if name and name not in used and at not in form.columns()
        ]
        if extra:
            notice(f"{len(extra)} columns that the format does not use: {_listed(extra)}")
        self.columns = {name: at for at, name in enumerate(names)}
        self.width = 0 if form.ragged else len(names)

    def _hint(self, header: _Cells, used: set[str]) -> str:
        """What to declare instead, if that can be seen."""
        for delimiter, name in _DELIMITERS.items():
            text = self._form.delimiter.join(header.cells)
            if used <= {each.strip().strip(_QUOTE) for each in text.split(delimiter)}:
                return f". Declare delimiter = {name}"
        for number, text in islice(self._lines, _SEARCHED):
            if used <= {each.strip().strip(_QUOTE) for each in text.split(self._form.delimiter)}:
                return f". The header is line {number}: declare skip_lines = {number - 1}"
        if any(character.isdigit() for character in "".join(header.cells)):
            return ". If this line is data, declare header = false and name columns by number"
        return ""


def _wrong_header(line: int, error: MalformedRecord) -> None:
    raise FormatError(f"the header (line {line}) cannot be read: {error.message}")


def _columns(many: str, names: list[str]) -> str:
    return f"{many} {'columns' if many == 'two' else 'column'} {_listed(names)}"


def _listed(names: list[str]) -> str:
    text = ", ".join(f"'{name}'" for name in names)
    return text if len(text) <= 200 else f"{text[:200]}..."
