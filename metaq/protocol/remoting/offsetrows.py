"""How far groups are, as it is exported: the answer to 30040, and the bodies of ``HISTORY_TOPIC`` (docs/remoting.md).

A row is one group in one partition at one moment, and a JSON object with the members of ``OffsetRow``; times are ISO 8601, in
UTC with milliseconds, which Spark, Arrow and databases read as they are::

    {"ts":"2026-01-31T12:00:00.000Z","broker":"metaq","group":"billing","kind":"remoting","topic":"orders","partition":0,
     "consumed":17,"minimum":0,"maximum":20,"consumed_ts":"2026-01-31T11:59:58.120Z","minimum_ts":"2026-01-30T…",
     "maximum_ts":"2026-01-31T…","owner":"10.0.0.7@4711","retention_ms":259200000}

Rows stand one a line in messages and files, and in pages in the answer::

    {"rows":[{…},{…}],"next":"[1769860800000,\\"remoting\\",\\"billing\\",\\"orders\\"]","problem":null}

``next`` is where the next page begins, ``null`` on the last one; ``problem`` says what is missing from this one.
"""

import enum
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import orjson

from metaq.errors import BadRequest
from metaq.protocol.remoting.headers import Int32

HISTORY_TOPIC: Final = "METAQ_SYS_OFFSET_HISTORY"
"""Where masters record all rows again and again."""
MOST_ROWS: Final = 1000
"""Rows in one page after which it ends, with the last topic of a group whole: 300 KB, or twice that."""


class Kind(enum.StrEnum):
    """Who knows how far a group is."""

    OBSERVED = "observed"
    """Nobody: the last position that a reader of the text protocol has asked for."""
    REMOTING = "remoting"
    """The broker: what members of a RocketMQ group have committed."""
    ZOOKEEPER = "zookeeper"
    """ZooKeeper: what members of a MetaQ group have stored there."""


class OffsetRow(NamedTuple):
    """One group in one partition. Offsets are ordinals (queue offsets); times are Unix milliseconds."""

    ts: int
    """The moment: the same in all rows of one look at a broker."""
    broker: str
    group: str
    kind: str
    """One of ``Kind``."""
    topic: str
    partition: int
    """Its number on this broker."""
    consumed: int | None
    """The next one for the group; ``None`` when that is not known."""
    minimum: int
    """The oldest one that is there."""
    maximum: int
    """The one that the next message will have."""
    consumed_ts: int | None
    """When the next message for the group was stored: at ``consumed``, or at ``minimum`` where that has aged out. ``None``
    when there is none, so the group is at the end, and when its time or ``consumed`` is not known."""
    minimum_ts: int | None
    """When the oldest message was stored; ``None`` in an empty partition."""
    maximum_ts: int | None
    """The newest one, at ``maximum`` − 1."""
    owner: str | None
    """The client that has the partition: its id, or of an observed one HOST:PORT; ``None``: nobody."""
    retention_ms: int | None
    """Age at which messages may be deleted; ``None`` when that is not known."""


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)
_TIMES: Final = ("ts", "consumed_ts", "minimum_ts", "maximum_ts")


class ExportOffsets(NamedTuple):
    """30040."""

    limit: Int32 = Int32(MOST_ROWS)
    after: str | None = None
    """``next`` of the page before."""


class OffsetPage(NamedTuple):
    """Some rows of one look."""

    rows: list[OffsetRow]
    next: str | None
    problem: str | None


def encode_row(row: OffsetRow) -> bytes:
    """One line, without its end."""
    times = {name: None if (ms := getattr(row, name)) is None else _iso(ms) for name in _TIMES}
    return orjson.dumps({**row._asdict(), **times})


def decode_lines(data: bytes) -> list[OffsetRow]:
    """Rows that stand one a line. ``BadRequest``."""
    return [_row(_parsed(line)) for line in data.splitlines()]


def encode_page(rows: Iterable[bytes], following: str | None, problem: str | None) -> bytes:
    """Body of the answer to 30040, of rows that are encoded already: a thousand at once would hold up everybody else."""
    return orjson.dumps({"rows": list(map(orjson.Fragment, rows)), "next": following, "problem": problem})


def decode_page(data: bytes) -> OffsetPage:
    """The inverse of ``encode_page``. ``BadRequest``."""
    page = _parsed(data)
    try:
        return OffsetPage(list(map(_row, page["rows"])), page["next"], page["problem"])
    except (TypeError, LookupError) as error:
        raise BadRequest(f"a page of offsets cannot be read: {data[:80]!r}") from error


def _row(content: Mapping[str, Any]) -> OffsetRow:
    """Members of later versions are left out."""
    try:
        values = {name: content[name] for name in OffsetRow._fields}
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
