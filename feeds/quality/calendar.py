"""When a venue is open: weekly hours in its zone, holidays, and days on which it closes early."""

import re
from collections.abc import Iterator, Sequence
from datetime import date, datetime, timedelta
from zoneinfo import ZoneInfo

from feeds.wall_times import parse_zone

_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_HOURS = re.compile(r"(\w{3})(?:-(\w{3}))? (\d\d):(\d\d)-(\d\d):(\d\d)")
_EARLY = re.compile(r"(\d{4}-\d\d-\d\d) (\d\d):(\d\d)")
_DAY = 24 * 60


class Calendar:
    """A venue's hours: "mon-fri 09:30-16:00", or over midnight "sun-thu 18:00-17:00".

    ``holidays``: dates as ISO 8601 on which no session begins. ``half_days``: a date and when its session
    ends, "2026-11-27 13:00". Raises ValueError that says what is wrong.
    """

    def __init__(
        self, zone: str, hours: Sequence[str], holidays: Sequence[str] = (), half_days: Sequence[str] = ()
    ) -> None:
        parse_zone(zone)
        self._zone = ZoneInfo(zone)
        self._hours = [each for text in hours for each in _weekly(text)]
        self._holidays = {date.fromisoformat(each) for each in holidays}
        self._early = dict(map(_early, half_days))
        self._found: tuple[int, int] | None = None

    def opened(self, now_ns: int) -> int | None:
        """When the session of this wall time began, ns; None while the venue is closed."""
        if self._found is None or not self._found[0] <= now_ns < self._found[1]:
            self._found = next((span for span in self._sessions(now_ns) if span[0] <= now_ns < span[1]), None)
        return None if self._found is None else self._found[0]

    def _sessions(self, now_ns: int) -> Iterator[tuple[int, int]]:
        """Those that begin on the day of this time or the day before: from when to when, ns."""
        today = datetime.fromtimestamp(now_ns // 10**9, self._zone).date()
        for day in (today, today - timedelta(days=1)):
            if day in self._holidays:
                continue
            for weekday, begins, ends in self._hours:
                if weekday == day.weekday():
                    yield self._at(day, begins), self._at(day, min(ends, self._early.get(day, ends)))

    def _at(self, day: date, minutes: int) -> int:
        days, minutes = divmod(minutes, _DAY)
        wall = datetime.combine(day + timedelta(days=days), datetime.min.time(), self._zone)
        return int(wall.replace(hour=minutes // 60, minute=minutes % 60).timestamp()) * 10**9


def _weekly(text: str) -> Iterator[tuple[int, int, int]]:
    """Weekday, and minutes since its midnight of opening and end, which may be past the next midnight."""
    match = _HOURS.fullmatch(text)
    days = [day for day in (match[1], match[2] or match[1]) if day in _DAYS] if match else []
    if match is None or len(days) < 2:
        raise ValueError(f'{text!r} are no hours such as "mon-fri 09:30-16:00"')
    begins, ends = _minutes(match[3], match[4]), _minutes(match[5], match[6])
    first, last = map(_DAYS.index, days)
    for number in range(first, last + 1 if last >= first else last + 8):
        yield number % 7, begins, ends if ends > begins else ends + _DAY


def _early(text: str) -> tuple[date, int]:
    match = _EARLY.fullmatch(text)
    if match is None:
        raise ValueError(f'{text!r} is no date and time such as "2026-11-27 13:00"')
    return date.fromisoformat(match[1]), _minutes(match[2], match[3])


def _minutes(hours: str, minutes: str) -> int:
    found = int(hours) * 60 + int(minutes)
    if found > _DAY or int(minutes) > 59:
        raise ValueError(f"{hours}:{minutes} is no time of day")
    return found
