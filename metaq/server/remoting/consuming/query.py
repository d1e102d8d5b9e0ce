"""Single messages: by key (12), by log offset (33) (specs: remoting protocol, section 3.2.5)."""

from typing import Final

from metaq.engine.context import Context
from metaq.errors import RequestFailed
from metaq.protocol.record import identity
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import QueryMessage, ViewMessage, decode_header
from metaq.protocol.text.messages import Stored
from metaq.server.access.permissions import Action, demand
from metaq.server.remoting.later import Later
from metaq.server.remoting.session import Answer, RemotingSession, RequestHandler
from metaq.store.files.filecache import Read

UNIQUE_KEY_QUERY: Final = "_UNIQUE_KEY_QUERY"
"""The field that marks the key as a unique key."""
MOST_UNIQUE: Final = 32
"""Messages with one unique key: the original, its retries and its dead letter, which are in different topics."""
EVER: Final = 1 << 62
"""A time beyond all others."""


class QueryHandler:
    """Handles queries for single messages."""

    def __init__(self, context: Context, later: Later) -> None:
        self._store = context.store
        self._later = later

    def requests(self) -> dict[int, RequestHandler]:
        return {Request.QUERY_MESSAGE: self.query, Request.VIEW_MESSAGE_BY_ID: self.view}

    def query(self, session: RemotingSession, request: RemotingCommand) -> Answer | None:
        """Return the newest messages with a key that were stored in a period (12); code 22 when there are none.

        For a unique key the period is ignored, since the key alone identifies the message. Clients derive the period from the
        key, and so from the clock and the time zone of the message's producer.
        """
        header = decode_header(QueryMessage, request.fields)
        demand(session.principal, Action.SUBSCRIBE, header.topic)
        begin_ms, end_ms, most = header.begin_timestamp, header.end_timestamp, int(header.max_num)
        if request.fields.get(UNIQUE_KEY_QUERY) == "true":
            begin_ms, end_ms, most = 0, EVER, MOST_UNIQUE

        def find(read: Read) -> Answer:
            found = self._store.query(header.topic, header.key, begin_ms, end_ms, most, read)
            if not found:
                hint = f"no message of the topic {header.topic} has the key {header.key!r} and was stored in that time"
                return Answer(Response.QUERY_NOT_FOUND, remark=hint)
            # everything stored so far was searched
            fields = {"indexLastUpdateTimestamp": self._store.clock.now_ms(), "indexLastUpdatePhyoffset": self._store.log.end}
            texts = {name: str(value) for name, value in fields.items()}
            return Answer(fields=texts, body=[_bytes(stored) for stored in found])

        self._later.read(session, request, find)
        return None

    def view(self, session: RemotingSession, request: RemotingCommand) -> Answer | None:
        """Return the message at a log offset, which is the end of its message id (33)."""
        header = decode_header(ViewMessage, request.fields)
        principal = session.principal

        def find(read: Read) -> Answer:
            stored = self._store.record_at_offset(header.offset, read)
            if stored is None:
                raise RequestFailed(Response.SYSTEM_ERROR, f"there is no message at the log offset {header.offset}")
            demand(principal, Action.SUBSCRIBE, identity(_bytes(stored)).topic)
            return Answer(body=[_bytes(stored)])

        self._later.read(session, request, find)
        return None


def _bytes(stored: Stored) -> memoryview:
    return stored.buffer[stored.at : stored.at + stored.size]
