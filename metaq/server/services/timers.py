"""Delayed and recurring messages: which wait, when they come, and ending them."""

from base64 import b64encode
from functools import partial
from typing import Annotated

from msgspec import Meta

from metaq.client.admin.views import read_due, read_recurring, read_timers
from metaq.errors import BadRequest
from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.recall import decode_recall
from metaq.server.access.permissions import Action
from metaq.server.services.call import Call
from metaq.server.services.outgoing import body_bytes
from metaq.server.services.rows import After, Done, Input, Name, Output, Partition, RowPage, UnixMs
from metaq.timers.handles import Handle, read_handle
from metaq.timers.records import LATEST_MS

MOST_PAGE = 100
MOST_PAGES = 20
"""Pages that one search for the timers of a topic looks at."""
_LAST = 10**18 - 1
"""The last id that a page can begin after."""
HandleText = Annotated[str, Meta(min_length=1, max_length=1024, description="The `handle` of a delayed message.")]


class TimersQuery(Input, frozen=True):
    """The begin and the length of a page."""

    after: After = ""
    limit: Annotated[int, Meta(ge=1, le=MOST_PAGE)] = MOST_PAGE


class PendingQuery(TimersQuery, frozen=True):
    """The delayed messages that are wanted."""

    topic: Annotated[str, Meta(max_length=255, description="Only those of this topic.")] = ""
    from_ms: Annotated[UnixMs, Meta(description="Only those that come then or later.")] = 0


class PendingTimer(Output, frozen=True):
    """A message that waits for its time."""

    due_ms: UnixMs
    id: Annotated[int, Meta(description="The place in the log where it was parked first.")]
    topic: Annotated[str | None, Meta(description="Null when the message cannot be read.")]
    partition: int | None
    size: Annotated[int | None, Meta(description="Bytes of its body.")]
    recurring: Annotated[str | None, Meta(description="The recurring message of which it is the next run.")]
    handle: Annotated[str | None, Meta(description="What cancels it; null for those who may only look.")]


class RecurringMessage(Output, frozen=True):
    """A recurring message."""

    name: str
    cron: str
    zone: str
    topic: str
    partition: int
    missed: str
    due_ms: Annotated[UnixMs | None, Meta(description="When it comes next.")]
    size: int


class RecurringInput(Input, frozen=True):
    """A recurring message, in place of one with this name."""

    cron: Annotated[str, Meta(min_length=1, max_length=255, description="As `0 2 * * *`, `@every 90s` or `@daily`.")]
    topic: Name
    body: str = ""
    body_base64: str | None = None
    zone: Annotated[str, Meta(max_length=255)] = "UTC"
    partition: Annotated[Partition | None, Meta(description="By default each in turn.")] = None
    tag: Annotated[str, Meta(max_length=255)] | None = None
    missed: Annotated[
        str, Meta(max_length=16, description="What becomes of times that pass while the broker is down: last, all, none.")
    ] = "last"


class FirstRun(Output, frozen=True):
    """The first time of a recurring message."""

    due_ms: UnixMs


def list_timers(call: Call, query: PendingQuery) -> RowPage[PendingTimer]:
    """Return a page of the messages that wait for their time, the first due first; of one topic, it may have few or none."""
    rows, after = list[PendingTimer](), query.after or _begin(query.from_ms)
    for _ in range(MOST_PAGES):
        found, following = read_timers(call.ask(Request.LIST_TIMERS, body=_members(after, query.limit)).body)
        wanted = [PendingTimer(**row._asdict()) for row in found if query.topic in ("", row.topic)]
        for row in wanted:
            if len(rows) == query.limit:
                return RowPage(rows=rows, next=_place(rows[-1]))
            rows.append(row)
        if following is None or len(rows) == query.limit:
            return RowPage(rows=rows, next=following)
        after = following
    return RowPage(rows=rows, next=after)


def _begin(from_ms: int) -> str:
    """Return the ``after`` of a page that begins at a time; empty for the first page."""
    return f"{min(from_ms - 1, LATEST_MS)}-{_LAST}" if from_ms else ""


def _place(row: PendingTimer) -> str:
    """Return the ``after`` of a page that begins after a row."""
    return f"{row.due_ms}-{row.id}"


def cancel_timer(call: Call, handle: HandleText) -> Done:
    """Cancel a delayed message."""
    call.demand(Action.PUBLISH)
    call.interior.cancels.cancel(_handle(handle), partial(call.demand, Action.PUBLISH))
    return Done()


def list_recurring(call: Call, query: TimersQuery) -> RowPage[RecurringMessage]:
    """Return a page of the recurring messages, by name."""
    rows, following = read_recurring(call.ask(Request.CRON, body=_members(query.after, query.limit, do="list")).body)
    return RowPage(rows=[RecurringMessage(**row._asdict()) for row in rows], next=following)


def define_recurring(call: Call, name: Name, body: RecurringInput) -> FirstRun:
    """Define a recurring message, and return when it comes first."""
    members = {
        "do": "define",
        "name": name,
        "cron": body.cron,
        "topic": body.topic,
        "body": b64encode(body_bytes(body.body, body.body_base64)).decode(),
        "zone": body.zone,
        "partition": -1 if body.partition is None else body.partition,
        "attribute": body.tag,
        "missed": body.missed,
    }
    return FirstRun(due_ms=read_due(call.ask(Request.CRON, body=fastjson.encode(members)).body))


def end_recurring(call: Call, name: Name) -> Done:
    """End a recurring message: no run comes any more."""
    call.ask(Request.CRON, body=fastjson.encode({"do": "undefine", "name": name}))
    return Done()


def _members(after: str, limit: int, **more: str) -> bytes:
    return fastjson.encode({**more, "limit": limit, **({"after": after} if after else {})})


def _handle(text: str) -> Handle:
    """Return a handle in either of its forms: the one that people type, or that of the remoting protocol's answers."""
    try:
        return read_handle(text)
    except BadRequest:
        return read_handle(decode_recall(text).handle)
