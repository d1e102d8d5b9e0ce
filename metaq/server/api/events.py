"""Streams of rows as server-sent events: one row at a time, and no further than the reader reads."""

from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from metaq.errors import MetaqError
from metaq.server.api.problems import problem_of
from metaq.server.http.httpserver import Deadline
from metaq.server.services.call import Call
from metaq.server.services.messages import StoredMessage

STEP_S: Final = 30.0
"""The longest that a row may take to come and to be read; a tail without messages says so more often."""
_QUIET: Final = b": nothing new\n\n"
_last: Final[deque[tuple[Any, bytes]]] = deque(maxlen=1)
"""The last row that several streams may have, and its event."""


def events(call: Call, rows: Iterator[Any], deadline: Deadline) -> Iterator[bytes]:
    """Yield rows as events, then end the call. An error ends the stream with the event ``problem``.

    Each is written before the next is looked for, so that a slow reader costs one row; one that reads nothing for ``STEP_S``
    is dropped.
    """
    try:
        yield b"retry: 2000\n\n"
        deadline.within(STEP_S)
        for row in rows:
            yield _QUIET if row is None else _event(row)
            deadline.within(STEP_S)
    except MetaqError as error:
        is_known = call.principal.named or not call.interior.endpoint.authentication.has_users
        yield b"event: problem\ndata: " + msgspec.json.encode(problem_of(error, is_known=is_known)) + b"\n\n"
    finally:
        call.end()


def _event(row: Any) -> bytes:
    if isinstance(row, StoredMessage):
        return f"id: {row.partition}-{row.offset}\n".encode() + _data(row)
    if not _last or _last[0][0] is not row:  # what many watch is one row
        _last.append((row, _data(row)))
    return _last[0][1]


def _data(row: Any) -> bytes:
    return b"data: " + msgspec.json.encode(row) + b"\n\n"
