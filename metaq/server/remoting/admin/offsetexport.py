"""The offsets and lags of all groups, for programs that store or report them: 30040."""

from functools import partial
from typing import Final

import orjson

from metaq.engine.context import Context
from metaq.engine.offsets.offsetexport import FIRST, OffsetExporter, Subject
from metaq.errors import BadRequest
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import decode_header
from metaq.protocol.remoting.offsetrows import MOST_ROWS, ExportOffsets, encode_row_page
from metaq.server.access.permissions import Action, demand
from metaq.server.remoting.later import Later
from metaq.server.remoting.session import Answer, RemotingSession, RequestHandler

PAGE_S: Final = 2.0
"""Seconds after which a page ends, however few rows it has: reads from a slow disk must not exceed the clients' timeout."""


class OffsetExportHandler:
    """Answers page by page. No state is kept between pages: each begins with a list of the groups and topics of that moment."""

    def __init__(self, context: Context, later: Later, export: OffsetExporter) -> None:
        self._context = context
        self._later = later
        self._export = export

    def requests(self) -> dict[int, RequestHandler]:
        """Return the handler methods by request code."""
        return {Request.EXPORT_OFFSETS: self.export}

    def export(self, session: RemotingSession, request: RemotingCommand) -> None:
        """Return one page of the offsets of all groups (30040); slaves answer it too."""
        header = decode_header(ExportOffsets, request.fields)
        demand(session.principal, Action.INSPECT)
        if not 1 <= header.limit <= MOST_ROWS:
            raise BadRequest(f"limit is {header.limit}, not a number from 1 to {MOST_ROWS}")
        ts_ms, after = (self._context.store.clock.now_ms(), FIRST) if header.after is None else _place(header.after)
        self._later.run(session, request, partial(self._page, header.limit, ts_ms, after))

    def _page(self, limit: int, ts_ms: int, after: Subject) -> Answer:
        rows: list[bytes] = []
        problem = following = None
        monotonic = self._context.store.clock.monotonic
        end_s = monotonic() + PAGE_S
        for part in self._export.look(ts_ms, after):
            rows += part.rows
            problem = part.problem or problem
            if part.problem is None and (len(rows) >= limit or monotonic() > end_s):
                following = orjson.dumps([ts_ms, *part.subject]).decode()
                break
        return Answer(body=(encode_row_page(rows, following, problem),))


def _place(text: str) -> tuple[int, Subject]:
    """Return the time and the subject after which a page begins, as written by ``_page``. Raise ``BadRequest``."""
    try:
        ts_ms, kind, group, topic = orjson.loads(text)
        return int(ts_ms), Subject(str(kind), str(group), str(topic))
    except (ValueError, TypeError) as error:
        raise BadRequest(f"after is {text[:80]!r}, not the `next` of a page") from error
