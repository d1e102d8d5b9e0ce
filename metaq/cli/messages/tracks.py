"""The groups that have consumed a message."""

from typing import Final

from metaq.cli.tables import Row
from metaq.client import Admin, Model, ReceivedMessage
from metaq.errors import RouteNotFound
from metaq.message import DEAD_PREFIX, RETRY_PREFIX
from metaq.protocol.subscription import parse_subscription

CONSUMED: Final = "consumed"
FILTERED: Final = "passed over: its tag is not wanted"
WAITING: Final = "not yet"
OFFLINE: Final = "not yet: no consumer is connected"
RETRIED: Final = "failed, and is delivered again"
DEAD: Final = "failed for good: a dead letter"
UNKNOWN: Final = "not known: each member keeps its own offsets"


def tracks(admin: Admin, message: ReceivedMessage) -> list[Row]:
    """Return the state of a message in each group that consumes its topic."""
    return [{"group": group, "state": state(admin, group, message)} for group in admin.groups_of_topic(message.queue.topic)]


def state(admin: Admin, group: str, message: ReceivedMessage) -> str:
    """Return the state of a message in a group, as far as offsets, tags, retries and dead letters show it.

    An SQL92 condition is not evaluated.
    """
    if is_in(admin, f"{DEAD_PREFIX}{group}", message):
        return DEAD
    if is_in(admin, f"{RETRY_PREFIX}{group}", message, ahead_of=group):
        return RETRIED
    members = admin.members(group)
    if members is not None and members.model == Model.BROADCASTING.value:
        return UNKNOWN
    committed = admin.offsets(group, message.queue.topic).get(message.queue, 0)
    if committed <= message.queue_offset:
        return OFFLINE if members is None else WAITING
    topic = message.queue.topic
    if members is None or topic not in members.subscriptions:
        return CONSUMED
    subscription = parse_subscription(topic, members.subscriptions[topic], 0, members.kinds[topic])
    return CONSUMED if subscription.matches_tag(message.tag) else FILTERED


def is_in(admin: Admin, topic: str, message: ReceivedMessage, *, ahead_of: str | None = None) -> bool:
    """Return whether a copy is in a group's own topic and, with ``ahead_of``, that group has not consumed it yet."""
    try:
        copies = admin.query_by_id(topic, message.id)
    except RouteNotFound as error:
        if error.retriable:
            raise
        return False
    if ahead_of is None or not copies:
        return bool(copies)
    offsets = admin.offsets(ahead_of, topic)
    return any(offsets.get(copy.queue, 0) <= copy.queue_offset for copy in copies)
