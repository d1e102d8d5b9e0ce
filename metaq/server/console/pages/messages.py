"""Messages: those of a topic, from any place on; found by key or id; one with who consumed it; as they come; and new ones."""

from base64 import b64decode
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

from metaq.engine.pool import run_in_pool
from metaq.errors import BadRequest, MetaqError, RequestFailed, UnknownTopic
from metaq.server.console.bodies import FORMS, preview, shown_body
from metaq.server.console.visit import PAGE_ROWS, GoTo, PageChange, PageFile, PageStream, PageView, Route, Visit, link, time_ms
from metaq.server.services.messages import (
    NewestQuery,
    ReadQuery,
    SearchQuery,
    StoredMessage,
    TailQuery,
    by_offset_id,
    inflate,
    read_messages,
    read_newest,
    search,
    show_message,
    tail,
)
from metaq.server.services.rows import NamesQuery
from metaq.server.services.sending import MessageInput, publish
from metaq.server.services.topics import TopicDetail, show_topic
from metaq.server.services.tracks import track_message

_TOPIC: Final = "/topics/{topic}"
_MESSAGE: Final = "/messages/{offset_id}"
_MOST_KEYS: Final = 64


# -- a topic's --------------------------------------------------------------------------------------------------------


def _browse(visit: Visit) -> dict[str, Any]:
    """Return the newest messages of all partitions, or those of one partition from a place on."""
    topic = show_topic(visit.call, visit.path["topic"])
    values: dict[str, Any] = {"topic": topic, "partition": None, "query": visit.query, "earlier": None, "later": None}
    partition, began_ms = _partition(visit, topic), time_ms(visit.query.get("time", ""))
    if partition is None:
        if began_ms is not None or visit.query.get("offset"):
            raise BadRequest("an offset or a time is one of a partition: choose the partition, too")
        rows = read_newest(visit.call, topic.topic, NewestQuery(limit=PAGE_ROWS)).rows
        return {**values, "messages": [_listed(row) for row in rows]}
    [ends] = [row for row in topic.ends if row.partition == partition]
    more: dict[str, object] = {"limit": PAGE_ROWS}
    if began_ms is not None:
        more["time_ms"] = began_ms
    elif not visit.query.get("offset"):
        more["offset"] = max(ends.begin, ends.end - PAGE_ROWS)
    read = read_messages(visit.call, topic.topic, partition, visit.asked(ReadQuery, **more))
    first = read.messages[0].offset if read.messages else read.next
    if first > read.begin:
        values["earlier"] = max(read.begin, first - PAGE_ROWS)
    if read.next < read.end:
        values["later"] = read.next
    return {**values, "partition": partition, "messages": [_listed(row) for row in read.messages]}


def _partition(visit: Visit, topic: TopicDetail) -> int | None:
    text = visit.query.get("partition", "")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 6 and int(text) < len(topic.ends)):
        raise BadRequest(f"the topic {topic.topic} has {len(topic.ends)} partitions, and {text[:20]!r} is not one of them")
    return int(text)


def _listed(row: StoredMessage) -> dict[str, Any]:
    return {"message": row, "preview": preview(row.body, row.size)}


def _tail(visit: Visit) -> dict[str, Any]:
    topic = show_topic(visit.call, visit.path["topic"])
    return {"topic": topic, "tags": visit.query.get("tags", "")}


def _tail_rows(visit: Visit) -> Iterator[Mapping[str, Any] | None]:
    rows = tail(visit.call, visit.path["topic"], visit.asked(TailQuery))
    return (None if row is None else {"row": _listed(row), "with_partition": True} for row in rows)


# -- found ------------------------------------------------------------------------------------------------------------


def _search(visit: Visit) -> dict[str, Any]:
    query = {name: visit.query.get(name, "").strip() for name in ("topic", "key", "id")}
    try:
        return {"query": query, "found": _found(visit, query)}
    except (BadRequest, RequestFailed, UnknownTopic) as error:  # beside the form, where it can be put right
        return {"query": query, "found": None, "error": error.told}


def _found(visit: Visit, query: Mapping[str, str]) -> list[dict[str, Any]] | None:
    """Return the messages that are looked for, the newest first; ``None`` when nothing is."""
    if query["topic"] and (query["key"] or query["id"]):
        asked = SearchQuery(key=query["key"], id=query["id"], limit=PAGE_ROWS)
        return [_listed(row) for row in reversed(search(visit.call, query["topic"], asked).rows)]
    if query["id"]:
        return [_listed(show_message(visit.call, query["id"]))]
    if query["key"]:
        raise BadRequest("a key is looked for in one topic: name it, too")
    return None


# -- one --------------------------------------------------------------------------------------------------------------


def _message(visit: Visit) -> dict[str, Any]:
    message = show_message(visit.call, visit.path["offset_id"])
    data = b64decode(message.body_base64 or "") if message.body is None else message.body.encode()
    body = run_in_pool(partial(shown_body, data, visit.query.get("as", "")))
    try:
        tracks, why = track_message(visit.call, visit.path["offset_id"], visit.asked(NamesQuery, limit=PAGE_ROWS)), ""
    except MetaqError as error:  # who may read the message need not be allowed to look into all groups' dead letters
        tracks, why = None, error.told
    return {"message": message, "body": body, "forms": FORMS, "tracks": tracks, "why": why}


def _download(visit: Visit) -> tuple[str, bytes]:
    message = by_offset_id(visit.call, visit.path["offset_id"])
    inflate(message)
    return f"{message.topic}-{message.partition}-{message.queue_offset}.bin", bytes(message.body)


# -- new ones ---------------------------------------------------------------------------------------------------------


def _publication(visit: Visit) -> dict[str, Any]:
    return {"topic": show_topic(visit.call, visit.path["topic"])}


def publish_message(visit: Visit) -> GoTo:
    """Publish one message."""
    keys = visit.sent.get("keys", "").split()[: _MOST_KEYS + 1]
    properties = _properties(visit.sent.get("properties", ""))
    body = visit.sent.get("body", "").replace("\r\n", "\n")  # a browser makes two characters of the end of a line
    message = visit.given(
        MessageInput, keys=keys, properties=properties, body=body, deliver_at_ms=time_ms(visit.sent.get("deliver_at", ""))
    )
    stored = publish(visit.call, visit.path["topic"], message)
    if stored.handle is not None:
        return GoTo(link("topics", stored.topic, "publish"), "delayed")
    return GoTo(link("messages", stored.offset_id), "published")


def _properties(text: str) -> dict[str, str]:
    """Return properties that were typed, one a line as ``name=value``. Raise ``BadRequest``."""
    found = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        name, sign, value = line.partition("=")
        if not sign or not name.strip():
            raise BadRequest(f"a property is a line name=value, and {line[:40]!r} is not")
        found[name.strip()] = value.strip()
    return found


_PUBLICATION: Final = PageView(f"{_TOPIC}/publish", "publish.html", _publication)
ROUTES: Final[tuple[Route, ...]] = (
    PageView(f"{_TOPIC}/messages", "messages.html", _browse),
    PageView(f"{_TOPIC}/tail", "tail.html", _tail),
    PageStream(f"{_TOPIC}/tail/events", "message_row.html", _tail_rows),
    PageView("/search", "search.html", _search),
    PageView(_MESSAGE, "message.html", _message),
    PageFile(f"{_MESSAGE}/body", _download),
    _PUBLICATION,
    PageChange(_PUBLICATION.path, publish_message, _PUBLICATION),
)
