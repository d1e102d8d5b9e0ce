"""Delayed and recurring messages as administrators see and change them: 30050, 30051 and 30053 (docs/remoting.md).

Bodies are JSON; a request has all of it in the body, and lists come in pages::

    30050  {"after":"1700000000000-81920","limit":100}  →  {"rows":[{"due_ms":…,"id":…,…}],"next":"1700000000000-98304"}
    30051                                               →  {"timers_pending":2,…}
    30053  {"do":"define","name":"nightly","cron":"0 2 * * *","topic":"jobs","body":"base64",…}  →  {"due_ms":1700000000000}
           {"do":"undefine","name":"nightly"}  →  {}
           {"do":"list","after":"nightly","limit":100}  →  {"rows":[…],"next":null}

``next`` is the ``after`` of the next page, and ``null`` on the last one.
"""

import binascii
from base64 import b64decode
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from metaq.errors import BadRequest
from metaq.protocol.remoting import fastjson

MOST_ROWS: Final = 100
"""Rows in one page, each of which may be a read from the disk."""


class TimerRow(NamedTuple):
    """A message that waits for its time."""

    due_ms: int
    id: int
    """The log offset of its first park."""
    topic: str | None
    """It, the partition and the size are ``None`` when the message cannot be read."""
    partition: int | None
    size: int | None
    """The size of its body in bytes."""
    recurring: str | None
    """The name of the recurring message of which it is the next run."""
    handle: str | None
    """What cancels it; ``None`` for runs of recurring messages, and for those who may only look."""


class RecurringRow(NamedTuple):
    """A recurring message."""

    name: str
    cron: str
    zone: str
    topic: str
    partition: int
    missed: str
    due_ms: int | None
    """When it comes next; ``None`` when that was lost with a damaged log."""
    size: int
    """The size of its body in bytes."""


def decode_object(body: bytes | memoryview) -> dict[str, Any]:
    """Return the members of a request's body; none when it is empty. Raise ``BadRequest`` for what is not an object."""
    value = fastjson.decode_plain(bytes(body)) if body else {}
    if not isinstance(value, dict):
        raise BadRequest(f"the body is {fastjson.shown(value)[:60]}, not an object")
    return value


def limit_of(members: Mapping[str, Any]) -> int:
    """Return how many rows a request wants. Raise ``BadRequest`` when that is not from 1 to ``MOST_ROWS``."""
    limit = fastjson.number_of(members, "limit", MOST_ROWS)
    if not 1 <= limit <= MOST_ROWS:
        raise BadRequest(f"limit is {limit}, not a number from 1 to {MOST_ROWS}")
    return limit


def body_of(members: Mapping[str, Any]) -> bytes:
    """Return the body of a message in a request. Raise ``BadRequest`` when it is not in base64."""
    try:
        return b64decode(fastjson.text_of(members, "body", ""), validate=True)
    except binascii.Error as error:
        raise BadRequest(f"body is not base64: {error}") from error


def encode_rows(rows: list[TimerRow] | list[RecurringRow], following: str | None) -> bytes:
    """Return the body of the answer with a page of a list."""
    return fastjson.encode({"rows": [row._asdict() for row in rows], "next": following})
