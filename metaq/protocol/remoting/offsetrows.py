"""The export of group offsets: the answer to 30040, and the bodies of ``HISTORY_TOPIC`` (docs/remoting.md).

A row says how far one group is in one partition at one moment. It is a JSON object with the members of ``OffsetRow``; times are
ISO 8601, in UTC with milliseconds, which Spark, Arrow and databases read directly::

    {"ts":"2026-01-31T12:00:00.000Z","broker":"metaq","group":"billing","kind":"remoting","topic":"orders","partition":0,
     "consumed":17,"minimum":0,"maximum":20,"consumed_ts":"2026-01-31T11:59:58.120Z","minimum_ts":"2026-01-30T…",
     "maximum_ts":"2026-01-31T…","owner":"10.0.0.7@4711","retention_ms":259200000,"lag":null,"in_flight":null,
     "delayed":null}

Messages and files hold one row a line; the answer comes in pages::

    {"rows":[{…},{…}],"next":"[1769860800000,\\"remoting\\",\\"billing\\",\\"orders\\"]","problem":null}

``next`` says where the next page begins, and is ``null`` on the last one; ``problem`` says what is missing from this one.
"""

import enum
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import orjson

from metaq.errors import BadRequest
from metaq.protocol.remoting.headers import Int32

MOST_ROWS: Final = 1000
"""Rows after which a page ends, but not within one topic of a group: 300 KB, or twice that."""


class Kind(enum.StrEnum):
    """The keeper of a group's offsets."""

    OBSERVED = "observed"
    """No keeper: the row has the last position that a reader of the text protocol has asked for."""
    REMOTING = "remoting"
    """The broker: the row has what members of a RocketMQ group have committed."""
    TOPIC = "topic"
    """Nobody: no group reads the topic, and the row, whose group is empty, has only what is in the topic."""
    ZOOKEEPER = "zookeeper"
    """ZooKeeper: the row has what members of a MetaQ group have stored there."""


class OffsetRow(NamedTuple):
    """One group in one partition, or a partition that no group reads.

    Offsets are ordinals (queue offsets); times are Unix milliseconds.
    """

    ts: int
    """The moment of the row, the same in all rows of one pass over a broker."""
    broker: str
    group: str
    kind: str
    """One of ``Kind``."""
    topic: str
    partition: int
    """The number of the partition on this broker."""
    consumed: int | None
    """The next offset for the group; ``None`` when that is not known."""
    minimum: int
    """The offset of the oldest message."""
    maximum: int
    """The offset that the next message will have."""
    consumed_ts: int | None
    """When the next message for the group was stored: the one at ``consumed``, or at ``minimum`` where that has aged out.
    ``None`` when the group is at the end, so there is none, and when its time or ``consumed`` is not known."""
    minimum_ts: int | None
    """When the oldest message was stored; ``None`` in an empty partition."""
    maximum_ts: int | None
    """When the newest message, at ``maximum`` − 1, was stored; ``None`` in an empty partition."""
    owner: str | None
    """The client that consumes the partition: its id, or HOST:PORT in an observed row; ``None`` when there is none."""
    retention_ms: int | None
    """The age at which messages may be deleted; ``None`` when that is not known."""
    lag: int | None = None
    """The messages that are not finished, of a group that leases them; ``None`` for others, which lack all from ``consumed``
    on."""
    in_flight: int | None = None
    """Those of them that consumers have."""
    delayed: int | None = None
    """Those that were given back with a delay which goes on."""


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)
_TIMES: Final = ("ts", "consumed_ts", "minimum_ts", "maximum_ts")
_OF_LEASES: Final = ("lag", "in_flight", "delayed")
"""Rows that were recorded before there were leases lack these."""


class ExportOffsets(NamedTuple):
    """Ask for a page of the offsets of all groups (30040)."""

    limit: Int32 = Int32(MOST_ROWS)
    after: str | None = None
    """The ``next`` of the previous page."""


class OffsetPage(NamedTuple):
    """Some of the rows of one pass over a broker."""

    rows: list[OffsetRow]
    next: str | None
    problem: str | None


def encode_row(row: OffsetRow) -> bytes:
    """Return the JSON of a row, without a line end."""
    times = {name: None if (ms := getattr(row, name)) is None else _iso(ms) for name in _TIMES}
    return orjson.dumps({**row._asdict(), **times})


def decode_lines(data: bytes) -> list[OffsetRow]:
    """Return the rows in lines of JSON. ``BadRequest`` when one cannot be read."""
    return [_row(_parsed(line)) for line in data.splitlines()]


def encode_row_page(rows: Iterable[bytes], following: str | None, problem: str | None) -> bytes:
    """Return the body of the answer to 30040. Rows come encoded: to encode a thousand at once would hold up other clients."""
    return orjson.dumps({"rows": list(map(orjson.Fragment, rows)), "next": following, "problem": problem})


def decode_page(data: bytes) -> OffsetPage:
    """Return the page in the body of the answer to 30040. ``BadRequest`` when it cannot be read."""
    page = _parsed(data)
    try:
        return OffsetPage(list(map(_row, page["rows"])), page["next"], page["problem"])
    except (TypeError, LookupError) as error:
        raise BadRequest(f"a page of offsets cannot be read: {data[:80]!r}") from error


def _row(content: Mapping[str, Any]) -> OffsetRow:
    """Return a row; members that later versions have added are ignored."""
    try:
        known = {**dict.fromkeys(_OF_LEASES), **content}
        values = {name: known[name] for name in OffsetRow._fields}
        values.update({name: _ms(values[name]) for name in _TIMES if values[name] is not None})
    except (TypeError, ValueError, LookupError) as error:
        raise BadRequest(f"a row of offsets cannot be read: {str(content)[:80]}") from error
    return OffsetRow(**values)


def _parsed(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"offsets are not JSON: {data[:80]!r}") from error


def _iso(ms: int) -> str:
    return (_EPOCH + timedelta(milliseconds=ms)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _ms(text: str) -> int:
    return (datetime.fromisoformat(text) - _EPOCH) // _MILLISECOND
