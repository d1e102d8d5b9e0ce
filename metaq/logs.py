"""Log lines on standard error: one for each event, with ``key=value`` context, and never with message bodies.

docs/events.md says what each event means. A line is made from a template, and the words before its first ``key=`` are the name
of the event, which never changes::

    logger.info("slave follows replica=%d address=%s", 2, "10.0.0.7:40112")

    text    2026-01-31T12:00:00.123Z INFO metaq.replication.feeder slave follows replica=2 address=10.0.0.7:40112
    json    {"time": "2026-01-31T12:00:00.123Z", "level": "INFO", "logger": "metaq.replication.feeder",
             "event": "slave follows", "replica": 2, "address": "10.0.0.7:40112"}

Both forms escape line ends and other control characters. A traceback is a value as well, ``trace``.
"""

import json
import logging
import math
import re
import sys
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final, Literal, NamedTuple

_KEY: Final = re.compile(r"(?:^| )(\w+)=")
_CONVERSION: Final = re.compile(r"%[^%a-zA-Z]*([a-zA-Z%])")
_ESCAPES: Final = {number: f"\\x{number:02x}" for number in (*range(32), *range(127, 160))} | {
    ord("\n"): "\\n",
    ord("\r"): "\\r",
    ord("\t"): "\\t",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}


def event_of(template: str) -> str:
    """Return the name of the event that a template logs."""
    found = _KEY.search(template)
    return template if found is None else template[: found.start()]


def keys_of(template: str) -> list[str]:
    """Return the keys of a template's context, in order."""
    return _KEY.findall(template)


class TextFormatter(logging.Formatter):
    """A formatter that writes time, level, logger and message on one line."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.levelname} {record.name} {record.getMessage()}"
        trace = _trace(record, self)
        line = f"{line} trace={trace}" if trace else line
        return line if line.isprintable() else line.translate(_ESCAPES)


class JsonFormatter(logging.Formatter):
    """A formatter that writes one JSON object: ``time``, ``level``, ``logger``, ``event`` and each key of the context."""

    def format(self, record: logging.LogRecord) -> str:
        content: dict[str, Any] = {"time": _time(record), "level": record.levelname, "logger": record.name}
        content.update(_split(record))
        trace = _trace(record, self)
        if trace:
            content["trace"] = trace
        return json.dumps(content, default=str)


MOST_LINES: Final = 2000
MOST_CHARACTERS: Final = 512 * 1024
"""Of all lines together."""
LONGEST_LINE: Final = 8192
_PLAIN: Final = logging.Formatter()


class LogLine(NamedTuple):
    """A log line that is kept in memory."""

    number: int
    """Of all lines since the start; the first is 1."""
    time_ms: int
    level: int
    logger: str
    text: str


class RecentLines(logging.Handler):
    """A handler that keeps the newest lines in memory, for those who look at them through the broker."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[LogLine] = deque()
        self._size = 0
        self.count = 0
        """How many lines there were since the start."""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line; the oldest ones make room."""
        trace = _trace(record, _PLAIN)
        text = f"{record.getMessage()} trace={trace}" if trace else record.getMessage()
        if len(text) > LONGEST_LINE:
            text = f"{text[:LONGEST_LINE]}…"
        text = text if text.isprintable() else text.translate(_ESCAPES)
        self.count += 1
        self._lines.append(LogLine(self.count, int(record.created * 1000), record.levelno, record.name, text))
        self._size += len(text)
        while len(self._lines) > MOST_LINES or self._size > MOST_CHARACTERS:
            self._size -= len(self._lines.popleft().text)

    def lines(self) -> list[LogLine]:
        """Return the lines, the oldest first."""
        self.acquire()
        try:
            return list(self._lines)
        finally:
            self.release()


RECENT: Final = RecentLines()
"""The newest lines of this process, once ``keep_recent`` was called. There is one, as logging itself is one for a process."""


def keep_recent() -> None:
    """Begin to keep the newest lines in ``RECENT``."""
    logging.getLogger().addHandler(RECENT)


_FORMATTERS: Final[dict[str, type[logging.Formatter]]] = {"text": TextFormatter, "json": JsonFormatter}


def configure(level: str, form: Literal["text", "json"] = "text") -> None:
    """Write records of ``level`` (DEBUG, INFO, WARNING, ERROR) and above to standard error; a second call changes both."""
    logging.basicConfig(stream=sys.stderr, level=level)
    root = logging.getLogger()
    root.setLevel(level)
    for handler in root.handlers:
        handler.setFormatter(_FORMATTERS[form]())


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _trace(record: logging.LogRecord, formatter: logging.Formatter) -> str:
    return formatter.formatException(record.exc_info) if record.exc_info else ""


def _split(record: logging.LogRecord) -> Iterator[tuple[str, Any]]:
    """Yield the event, then the context: numbers stay numbers, everything else becomes text."""
    template = record.msg
    if not isinstance(template, str) or (record.args and "%(" in template):
        yield "event", record.getMessage()
        return
    if not record.args:  # then logging does not format the message, and % is literal
        template = template.replace("%", "%%")
    arguments = record.args if isinstance(record.args, tuple) else (record.args,)  # logging unpacks a lone dictionary
    marks = list(_KEY.finditer(template))
    begins = [0, *(mark.end() for mark in marks)]
    ends = [*(mark.start() for mark in marks), len(template)]
    names = ["event", *(mark[1] for mark in marks)]
    at = 0
    for name, begin, end in zip(names, begins, ends, strict=True):
        part = template[begin:end]
        count = sum(kind != "%" for kind in _CONVERSION.findall(part))
        values = arguments[at : at + count]
        at += count
        lone = part in {"%d", "%s"} and _is_number(values[0])
        yield name, values[0] if lone else part % values if count or "%%" in part else part


def _is_number(value: object) -> bool:
    """Return whether JSON can hold the value as a number; infinity and NaN it cannot."""
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
