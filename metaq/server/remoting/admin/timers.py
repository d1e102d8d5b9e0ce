"""Delayed and recurring messages, for operators: 30050, 30051 and 30053."""

from functools import partial

from metaq.engine.context import Context
from metaq.engine.halfmessages import pairs_of
from metaq.engine.timers.figures import figures
from metaq.engine.timers.timing import Timing
from metaq.errors import BadRequest, StoreError
from metaq.protocol import properties
from metaq.protocol.record import decode_record
from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.fastjson import number_of, text_of
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.timers import (
    RecurringRow,
    TimerRow,
    body_of,
    decode_object,
    encode_rows,
    limit_of,
)
from metaq.server.access.permissions import Action, demand
from metaq.server.remoting.later import Later
from metaq.server.remoting.session import DONE, Answer, RemotingSession, RequestHandler
from metaq.store.files.filecache import Run, read_through
from metaq.timers.definitions import Missed, Recurring
from metaq.timers.records import LATEST_MS, Key, key_of, parts_of


class TimerAdminHandler:
    """Lists delayed messages; defines, lists and ends recurring ones."""

    def __init__(self, context: Context, timing: Timing, later: Later, run: Run) -> None:
        self._store = context.store
        self._timers, self._cancels, self._recurring = timing.timers, timing.cancels, timing.recurring
        self._later = later
        self._read = read_through(run)

    def requests(self) -> dict[int, RequestHandler]:
        """Return the handler methods by request code."""
        return {Request.LIST_TIMERS: self.list_, Request.TIMER_STATS: self.stats, Request.CRON: self.cron}

    def list_(self, session: RemotingSession, request: RemotingCommand) -> None:
        """Return a page of the pending timers, the first due first (30050)."""
        demand(session.principal, Action.INSPECT)
        members = decode_object(request.body)
        after, limit = _key(text_of(members, "after", "0-0")), limit_of(members)
        with_handles = session.principal.admin or session.principal.may(Action.ADMINISTER, "")
        self._later.run(session, request, partial(self._page, after, limit, with_handles=with_handles))

    def _page(self, after: Key, limit: int, *, with_handles: bool) -> Answer:
        if not self._timers.is_used:
            return Answer(body=(encode_rows([], None),))
        table = self._cancels.table()
        found = self._timers.upkeep.page(table, after, limit + 1)
        names = {key: definition.name for key, _ in found if (definition := table.definitions.of_run(key)) is not None}
        rows = []
        for key, place in found[:limit]:
            name = names.get(key)
            handle = self._timers.handle(key) if with_handles and name is None else None
            due_ms, ident = parts_of(key)
            topic, partition, size = self._facts(place)
            rows.append(TimerRow(due_ms, ident, topic, partition, size, name, handle))
        following = "{}-{}".format(*parts_of(found[limit - 1][0])) if len(found) > limit else None
        return Answer(body=(encode_rows(rows, following),))

    def _facts(self, place: int) -> tuple[str | None, int | None, int | None]:
        """Return topic, partition and bytes of a parked message."""
        try:
            stored = self._store.record_at_offset(place, self._read)
        except StoreError:
            stored = None
        if stored is None:
            return None, None, None
        record = decode_record(bytes(stored.buffer[stored.at : stored.at + stored.size]))
        pairs = pairs_of(record)
        return pairs.get(properties.REAL_TOPIC), int(pairs.get(properties.REAL_QUEUE, "0")), len(record.body)

    def stats(self, session: RemotingSession, request: RemotingCommand) -> Answer:
        """Return the figures of timers (30051)."""
        demand(session.principal, Action.INSPECT)
        return Answer(body=(fastjson.encode(figures(self._timers)),))

    def cron(self, session: RemotingSession, request: RemotingCommand) -> None:
        """Define, end or list recurring messages (30053)."""
        members = decode_object(request.body)
        match members.get("do"):
            case "list":
                demand(session.principal, Action.INSPECT)
                self._later.run(session, request, partial(self._list, text_of(members, "after", ""), limit_of(members)))
            case "define":
                demand(session.principal, Action.ADMINISTER)
                self._later.run(session, request, partial(self._define, _recurring(members)))
            case "undefine":
                demand(session.principal, Action.ADMINISTER)
                self._later.run(session, request, partial(self._undefine, text_of(members, "name")))
            case other:
                raise BadRequest(f"do is {fastjson.shown(other)[:60]}, not one of define, undefine, list")

    def _list(self, after: str, limit: int) -> Answer:
        found = self._recurring.list_(after, limit + 1)
        rows = [
            RecurringRow(each.name, each.cron, each.zone, each.topic, each.partition, each.missed, due_ms, size)
            for each, due_ms, size in found[:limit]
        ]
        return Answer(body=(encode_rows(rows, rows[-1].name if len(found) > limit else None),))

    def _define(self, recurring: Recurring) -> Answer:
        return Answer(body=(fastjson.encode({"due_ms": self._recurring.define(recurring)}),))

    def _undefine(self, name: str) -> Answer:
        self._recurring.undefine(name)
        return DONE


def _recurring(members: dict[str, object]) -> Recurring:
    return Recurring(
        name=text_of(members, "name"),
        cron=text_of(members, "cron"),
        topic=text_of(members, "topic"),
        body=body_of(members),
        zone=text_of(members, "zone", "UTC"),
        partition=number_of(members, "partition", -1),
        attribute=None if members.get("attribute") is None else text_of(members, "attribute"),
        flag=number_of(members, "flag", 0),
        missed=text_of(members, "missed", Missed.LAST),
    )


def _key(text: str) -> Key:
    due, _, ident = text.partition("-")
    if not all(part.isascii() and part.isdecimal() and len(part) <= 18 for part in (due, ident)) or int(due) > LATEST_MS:
        raise BadRequest(f"after is {text[:60]!r}, not DUE-ID as in next")
    return key_of(int(due), int(ident))
