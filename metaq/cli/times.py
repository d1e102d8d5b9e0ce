"""Times, and lengths of time, as people write them."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import click

from metaq.cli.common import Decorated

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
            span = _span(text.removesuffix(" ago"))
            return _point(text) if span is None else datetime.now(UTC) - span
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
    """``250ms``, ``90s``, ``15m``, ``3h`` or ``2d``."""

    name = "TIME"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> timedelta:
        if isinstance(value, timedelta):
            return value
        try:
            span = _span(str(value).strip())
        except OverflowError:
            span = None
        if span is None:
            self.fail(f"{value!r} is no length of time; write 90s, 15m, 3h or 2d", parameter, context)
        return span


def _span(text: str) -> timedelta | None:
    """Return a length of time; ``None`` for other texts, and for plain numbers, whose unit nobody knows. ``OverflowError``."""
    if not text[-1:].isalpha():
        return None
    from metaq.quantities import MILLISECONDS  # noqa: PLC0415 - brings fractions and decimals

    try:
        return timedelta(milliseconds=float(MILLISECONDS.parse(text)))
    except ValueError:
        return None


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
