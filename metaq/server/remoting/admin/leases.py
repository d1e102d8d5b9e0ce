"""Leases, for operators: 30052, 30054 and 30055."""

from functools import partial
from itertools import islice
from typing import Final

import gevent

from metaq.engine.context import Context
from metaq.engine.leases.leasing import Leasing
from metaq.engine.tables.groups import Group
from metaq.errors import BadRequest
from metaq.message import GroupPartition
from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.fastjson import number_of, text_of
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.leases.figures import OpenRow, PlaceRow, TopicRow
from metaq.protocol.remoting.timers import decode_object, limit_of
from metaq.server.access.permissions import Action, demand
from metaq.server.remoting.later import Later
from metaq.server.remoting.session import Answer, RemotingSession, RequestHandler

REST_S: Final = 0.001
"""Pause between two portions of a long list; with a sleep of 0, connections would not go on."""


class LeaseAdminHandler:
    """Lists leases. A slave has none: it learns what is leased when it takes over."""

    def __init__(self, context: Context, leasing: Leasing, later: Later) -> None:
        self._context = context
        self._leases = leasing.leases
        self._figures = leasing.figures
        self._later = later

    def requests(self) -> dict[int, RequestHandler]:
        """Return the handler methods by request code."""
        return {
            Request.LIST_LEASES: self.partitions,
            Request.LIST_OPEN_MESSAGES: self.messages,
            Request.LEASE_STATS: self.topics,
        }

    def partitions(self, session: RemotingSession, request: RemotingCommand) -> Answer:
        """Return a page of the partitions in which a group leases messages, by topic and number (30052)."""
        members = decode_object(request.body)
        group, topic = text_of(members, "group"), text_of(members, "topic", "")
        demand(session.principal, Action.INSPECT, group)
        after, limit = _place(text_of(members, "after", "")), limit_of(members)
        topics = [topic] if topic else self._topics(group)
        places = (place for name in topics if name >= after[0] for place in self._figures.partitions(group, name))
        found = list(islice((place for place in places if place[1:] > after), limit + 1))
        rows = [row for place in found[:limit] if (row := self._row(place)) is not None]
        following = f"{found[limit - 1].topic} {found[limit - 1].partition}" if len(found) > limit else None
        return _page(rows, following)

    def _topics(self, group: str) -> list[str]:
        return sorted(topic for each, topic in self._figures.pairs() if each == group)

    def _row(self, place: GroupPartition) -> PlaceRow | None:
        found = self._figures.of(place)
        if found is None:
            return None
        return PlaceRow(
            topic=place.topic,
            partition=place.partition,
            base=found.base,
            next=found.next,
            end=found.end,
            lag=found.lag,
            ready=found.ready,
            in_flight=found.in_flight,
            waiting=found.waiting,
            delayed=found.delayed,
            lined=found.lined,
            oldest_ms=found.oldest_ms,
        )

    def messages(self, session: RemotingSession, request: RemotingCommand) -> None:
        """Return a page of the open messages of a partition, the lowest first (30054)."""
        members = decode_object(request.body)
        place = GroupPartition(text_of(members, "group"), text_of(members, "topic"), number_of(members, "partition"))
        demand(session.principal, Action.INSPECT, place.group)
        after, limit = number_of(members, "after", -1, bits=64), limit_of(members)
        self._later.run(session, request, partial(self._messages, place, after, limit))

    def _messages(self, place: GroupPartition, after: int, limit: int) -> Answer:
        found = self._figures.open_from(place, after + 1, limit + 1, partial(gevent.sleep, REST_S))
        rows = [OpenRow(each.ordinal, each.times, each.state, each.first_ms, each.due_ms) for each in found[:limit]]
        return _page(rows, rows[-1].ordinal if len(found) > limit else None)

    def topics(self, session: RemotingSession, request: RemotingCommand) -> Answer:
        """Return a page of the topics of which a group leases messages, by name (30055)."""
        members = decode_object(request.body)
        group, after, limit = text_of(members, "group"), text_of(members, "after", ""), limit_of(members)
        demand(session.principal, Action.INSPECT, group)
        found = [topic for topic in self._topics(group) if topic > after]
        rows = [self._topic(group, topic) for topic in found[:limit]]
        return _page(rows, rows[-1].topic if len(found) > limit else None)

    def _topic(self, name: str, topic: str) -> TopicRow:
        counts, group = self._leases.counts.of(name, topic), self._context.groups.get(name) or Group(name)
        return TopicRow(
            topic=topic,
            mode=self._context.modes.get(topic, name).mode.value,
            waiting_consumers=self._figures.waiting_consumers(name, topic),
            given=counts.given,
            again=counts.again,
            dead=counts.dead,
            max_in_flight=group.max_in_flight,
            max_open=group.max_open,
            unkept=self._leases.unkept,
        )


def _page(rows: list[PlaceRow] | list[OpenRow] | list[TopicRow], following: str | int | None) -> Answer:
    return Answer(body=(fastjson.encode({"rows": [row._asdict() for row in rows], "next": following}),))


def _place(text: str) -> tuple[str, int]:
    """Return a topic and a partition in the form of ``next``; an empty text is before all."""
    topic, _, number = text.partition(" ")
    if text and not (number.isascii() and number.isdecimal() and len(number) <= 9):
        raise BadRequest(f"after is {text[:60]!r}, not TOPIC PARTITION as in next")
    return topic, int(number or -1)
