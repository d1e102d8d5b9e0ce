"""Times, and lengths of time, as people write them."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import click

from metaq.cli.common import Decorated

_SPAN: Final = re.compile(r"(\d{1,9})(s|m|h|d)")
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_UNIX_MS: Final = re.compile(r"\d{12,14}")


class When(click.ParamType[datetime]):
    """``2026-01-31T12:00``, with a zone or in the local one; ``90m`` for 90 minutes ago; ``now``; or Unix milliseconds."""

    name = "TIME"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        text = str(value).strip()
        if text == "now":
            return datetime.now(UTC)
        try:
            if _SPAN.fullmatch(span := text.removesuffix(" ago")):
                return datetime.now(UTC) - _span(span)
            return _point(text)
        except (ValueError, OverflowError):
            self.fail(f"{text!r} is no time; write 2026-01-31T12:00, 90m for 90 minutes ago, or now", parameter, context)


class Point(click.ParamType[datetime]):
    """``2026-01-31T12:00``, with a zone or in the local one, or Unix milliseconds: a time that may be in the future."""

    name = "TIME"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        try:
            return _point(str(value).strip())
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is no time; write 2026-01-31T12:00, or Unix milliseconds", parameter, context)


class SpanOption(click.ParamType[timedelta]):
    """``90s``, ``15m``, ``3h`` or ``2d``."""

    name = "TIME"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> timedelta:
        if isinstance(value, timedelta):
            return value
        try:
            return _span(str(value).strip())
        except ValueError:
            self.fail(f"{value!r} is no length of time; write 90s, 15m, 3h or 2d", parameter, context)


def _span(text: str) -> timedelta:
    found = _SPAN.fullmatch(text)
    if found is None:
        raise ValueError(text)
    return timedelta(**{_UNITS[found[2]]: int(found[1])})


def _point(text: str) -> datetime:
    if _UNIX_MS.fullmatch(text):
        return datetime.fromtimestamp(int(text) / 1000, UTC)
    return datetime.fromisoformat(text).astimezone()


def later_options(command: Decorated) -> Decorated:
    """Add ``--delay`` and ``--at``."""
    at = click.option("--at", type=Point(), help="Deliver it at this time: 2026-01-31T12:00, or Unix milliseconds.")
    return click.option("--delay", type=SpanOption(), metavar="LENGTH", help="Deliver it after 90s, 15m, 3h or 2d.")(
        at(command)
    )


TIMES: Final = "TIME is 2026-01-31T12:00, 90m for 90 minutes ago (s, m, h, d), now, or Unix milliseconds."
