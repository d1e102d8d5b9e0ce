"""Schedules: cron expressions, and intervals, as the times of recurring messages.

::

    expression  = MINUTE HOUR DAY MONTH WEEKDAY │ "@every" NUMBER("s" │ "m" │ "h" │ "d") │ "@hourly" │ "@daily" │ …
    field       = part { "," part }
    part        = ("*" │ value [ "-" value ]) [ "/" step ]        a step only after * or a range
    value       = a number │ jan … dec │ sun … sat               weekdays 0 to 7, both of which are Sunday

As in Vixie's cron a day matches when DAY or WEEKDAY does, unless one of the two begins with ``*``: then it must match both.

The fields mean minutes of the clock on the wall. One that comes twice, when the clock is set back, counts the first time; one
that is left out counts at the next minute that there is.
"""

import calendar
import re
from bisect import bisect_left
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta, tzinfo
from typing import Final, NamedTuple, Protocol

from metaq.errors import BadRequest

LONGEST: Final = 200
"""Characters of an expression."""
LONGEST_EVERY_MS: Final = 3650 * 24 * 3_600_000
YEARS: Final = 41
"""A day of a month falls on a given weekday within so many years: 29 February, around a year like 2100."""

_MINUTE: Final = timedelta(minutes=1)
_UNITS: Final = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 24 * 3_600_000}
_EVERY: Final = re.compile(r"@every\s+([0-9]{1,9})([smhd])", re.ASCII)
_PART: Final = re.compile(r"(?:(\*)|(\w+)(?:-(\w+))?)(?:/([0-9]{1,4}))?", re.ASCII)
_ALIASES: Final = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}


class _Field(NamedTuple):
    """The range and the names of a field."""

    name: str
    least: int
    most: int
    names: Mapping[str, int] = {}


_MONTHS: Final = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_WEEKDAYS: Final = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_FIELDS: Final = (
    _Field("minute", 0, 59),
    _Field("hour", 0, 23),
    _Field("day", 1, 31),
    _Field(
        "month",
        1,
        12,
        {
            name: at + 1
            for at, name in enumerate(["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"])
        },
    ),
    _Field("weekday", 0, 7, dict(zip(_WEEKDAYS, range(7), strict=True))),
)


class Recurrence(Protocol):
    """The times of a recurring message."""

    def next(self, after_ms: int) -> int:
        """Return the first time after one, both in Unix milliseconds."""
        ...

    def next_beyond(self, time_ms: int, now_ms: int) -> int:
        """Return the first time after now, of those that follow a time of this schedule that has come."""
        ...


class Every:
    """A schedule of equal intervals."""

    def __init__(self, interval_ms: int) -> None:
        self.interval_ms = interval_ms

    def next(self, after_ms: int) -> int:
        return after_ms + self.interval_ms

    def next_beyond(self, time_ms: int, now_ms: int) -> int:
        return time_ms + ((now_ms - time_ms) // self.interval_ms + 1) * self.interval_ms


class Cron:
    """A schedule of five fields, in a time zone."""

    def __init__(self, expression: str, zone: tzinfo) -> None:
        """Raise ``BadRequest`` for what is not an expression, or never matches."""
        texts = expression.lower().split()
        if len(texts) != len(_FIELDS):
            raise BadRequest(
                f"{expression!r} has {len(texts)} fields; a schedule is MINUTE HOUR DAY MONTH WEEKDAY, @every 90s or @daily"
            )
        minutes, hours, days, months, weekdays = map(_values, _FIELDS, texts)
        self._minutes, self._hours = sorted(minutes), sorted(hours)
        self._days, self._months, self._weekdays = days, months, {day % 7 for day in weekdays}
        self._needs_both = texts[2].startswith("*") or texts[4].startswith("*")
        self._zone = zone
        if self._needs_both and min(days) > max(calendar.monthrange(2024, month)[1] for month in months):
            raise BadRequest(f"{expression!r} never comes: none of its months has {min(days)} days")

    def next(self, after_ms: int) -> int:
        minute = datetime.fromtimestamp(after_ms // 1000, self._zone).replace(second=0, microsecond=0, tzinfo=None)
        while True:
            minute = self._matching(minute)
            found_ms = self._instant_ms(minute)
            if found_ms > after_ms:
                return found_ms
            minute += _MINUTE

    def next_beyond(self, time_ms: int, now_ms: int) -> int:
        return self.next(now_ms)

    def _matching(self, minute: datetime) -> datetime:
        """Return the first minute from one on that matches, on the wall."""
        day = minute.date()
        if self._has_day(day):
            for hour in self._hours[bisect_left(self._hours, minute.hour) :]:
                first = minute.minute if hour == minute.hour else 0
                at = bisect_left(self._minutes, first)
                if at < len(self._minutes):
                    return datetime(day.year, day.month, day.day, hour, self._minutes[at])
        day = self._next_day(day)
        return datetime(day.year, day.month, day.day, self._hours[0], self._minutes[0])

    def _has_day(self, day: date) -> bool:
        if day.month not in self._months:
            return False
        in_month, in_week = day.day in self._days, day.isoweekday() % 7 in self._weekdays
        return in_month and in_week if self._needs_both else in_month or in_week

    def _next_day(self, day: date) -> date:
        last = day.year + YEARS
        while day.year <= last:
            if day.month in self._months:
                day += timedelta(days=1)
            else:
                day = (day.replace(day=1) + timedelta(days=31)).replace(day=1)
            if self._has_day(day):
                return day
        raise AssertionError("the constructor has refused what never comes")

    def _instant_ms(self, minute: datetime) -> int:
        """Return when a minute on the wall begins, the first time; when there is no such minute, when the next one begins."""
        while True:
            instant = minute.replace(tzinfo=self._zone).astimezone(UTC)
            if instant.astimezone(self._zone).replace(tzinfo=None) == minute:
                return round(instant.timestamp()) * 1000
            minute += _MINUTE


def _values(field: _Field, text: str) -> set[int]:
    """Return the values of a field."""
    values: set[int] = set()
    for part in text.split(","):
        found = _PART.fullmatch(part)
        if found is None:
            raise _bad(field, part)
        star, low, high, step = found.groups()
        if step is not None and (int(step) == 0 or not (star or high)):
            raise BadRequest(f"the {field.name} {part!r}: a step is a number from 1 on, after * or a range")
        begin = field.least if star else _number(field, low, part)
        end = field.most if star else begin if high is None else _number(field, high, part)
        if begin > end:
            raise BadRequest(f"the {field.name} {part!r} ends before it begins")
        values.update(range(begin, end + 1, int(step or 1)))
    return values


def _number(field: _Field, text: str, part: str) -> int:
    number = field.names.get(text)
    if number is None:
        if not (text.isdecimal() and len(text) <= 2 and field.least <= int(text) <= field.most):
            raise _bad(field, part)
        number = int(text)
    return number


def _bad(field: _Field, part: str) -> BadRequest:
    names = f", or {'/'.join(field.names)}" if field.names else ""
    return BadRequest(f"the {field.name} {part[:40]!r} is not from {field.least} to {field.most}{names}")


def parse_schedule(expression: str, zone: str) -> Recurrence:
    """Return a schedule. Raise ``BadRequest`` for an expression that is none or never comes, and for an unknown time zone."""
    if len(expression) > LONGEST:
        raise BadRequest(f"a schedule of {len(expression)} characters is longer than {LONGEST}")
    text = expression.strip().lower()
    place = find_zone(zone)
    if text.startswith("@every"):
        found = _EVERY.fullmatch(text)
        interval_ms = 0 if found is None else int(found[1]) * _UNITS[found[2]]
        if not 1000 <= interval_ms <= LONGEST_EVERY_MS:
            raise BadRequest(f"{expression!r} is not an interval: write @every 90s, 15m, 3h or 2d, from 1s to 3650d")
        return Every(interval_ms)
    return Cron(_ALIASES.get(text, text), place)


def find_zone(name: str) -> tzinfo:
    """Return a time zone by its name in the zone database. Raise ``BadRequest`` for one that this machine does not know."""
    if name == "UTC":
        return UTC
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError  # noqa: PLC0415 - finding out where zones are kept takes 0.3 MB

    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise BadRequest(
            f"the broker's machine does not know the time zone {name[:40]!r}; names are as Europe/Berlin, and come with the "
            "operating system's zone database or the Python package tzdata"
        ) from error
