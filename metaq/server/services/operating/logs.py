"""The log of the last minutes."""

import enum
import logging
from typing import Annotated

from msgspec import Meta

from metaq.logs import RECENT
from metaq.server.access.permissions import Action
from metaq.server.services.call import Call
from metaq.server.services.rows import Input, Number, Output, UnixMs


class LogLevel(enum.Enum):
    """The levels of log lines."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogsQuery(Input, frozen=True):
    """The log lines that are wanted."""

    after: Annotated[Number, Meta(description="Only lines with a higher number: the `last` of the answer before.")] = 0
    level: Annotated[LogLevel, Meta(description="The lowest level.")] = LogLevel.DEBUG
    search: Annotated[str, Meta(max_length=255, description="Only lines that contain this text.")] = ""
    limit: Annotated[int, Meta(ge=1, le=2000, description="The most lines; the newest are returned.")] = 500


class LogRow(Output, frozen=True):
    """One log line."""

    number: Annotated[int, Meta(description="Of all lines since the start.")]
    time_ms: UnixMs
    level: str
    logger: str
    text: Annotated[str, Meta(description="The event and its context; docs/events.md has the events.")]


class LogRows(Output, frozen=True):
    """Log lines, the oldest first."""

    rows: list[LogRow]
    last: Annotated[int, Meta(description="The number of the newest line there is.")]


def show_logs(call: Call, query: LogsQuery) -> LogRows:
    """Return log lines of the last minutes, as many as the broker keeps in memory; for administrators: lines name users."""
    call.demand(Action.ADMINISTER)
    least = logging.getLevelNamesMapping()[query.level.name]
    lines = [
        line
        for line in RECENT.lines()
        if line.number > query.after and line.level >= least and query.search in f"{line.logger} {line.text}"
    ]
    rows = [
        LogRow(
            number=line.number,
            time_ms=line.time_ms,
            level=logging.getLevelName(line.level).lower(),
            logger=line.logger,
            text=line.text,
        )
        for line in lines[-query.limit :]
    ]
    return LogRows(rows=rows, last=RECENT.count)
