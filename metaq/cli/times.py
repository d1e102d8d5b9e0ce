"""Points in time as people write them."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import click

_AGO: Final = re.compile(r"(\d{1,9})(s|m|h|d)(?: ago)?")
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
            if found := _AGO.fullmatch(text):
                return datetime.now(UTC) - timedelta(**{_UNITS[found[2]]: int(found[1])})
            if _UNIX_MS.fullmatch(text):
                return datetime.fromtimestamp(int(text) / 1000, UTC)
            return datetime.fromisoformat(text).astimezone()
        except (ValueError, OverflowError):
            self.fail(f"{text!r} is no time; write 2026-01-31T12:00, 90m for 90 minutes ago, or now", parameter, context)


TIMES: Final = "TIME is 2026-01-31T12:00, 90m for 90 minutes ago (s, m, h, d), now, or Unix milliseconds."
