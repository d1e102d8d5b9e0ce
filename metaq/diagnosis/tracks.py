"""The groups that have consumed a message."""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from metaq.client import Model, ReceivedMessage
from metaq.client.admin.views import GroupMembers
from metaq.message import DEAD_PREFIX, RETRY_PREFIX, MessageQueue
from metaq.protocol.subscription import parse_subscription

CONSUMED: Final = "consumed"
FILTERED: Final = "passed over: its tag is not wanted"
WAITING: Final = "not yet"
OFFLINE: Final = "not yet: no consumer is connected"
RETRIED: Final = "failed, and is delivered again"
DEAD: Final = "failed for good: a dead letter"
UNKNOWN: Final = "not known: each member keeps its own offsets"


class Traces(Protocol):
    """Where messages leave traces: ``metaq.client.Admin``, or a broker itself."""

    def groups_of_topic(self, topic: str) -> Sequence[str]:
        """Return the groups that consume a topic or did so before."""
        ...

    def copies(self, topic: str, message_id: str) -> Sequence[ReceivedMessage]:
        """Return the messages of a topic with an id; none when there is no such topic."""
        ...

    def offsets(self, group: str, topic: str) -> Mapping[MessageQueue, int]:
        """Return the offsets that a group has committed in a topic."""
        ...

    def members(self, group: str) -> GroupMembers | None:
        """Return the members of a group; ``None`` when none is connected."""
        ...


def track_of(traces: Traces, group: str, message: ReceivedMessage) -> str:
    """Return the state of a message in a group, as far as offsets, tags, retries and dead letters show it.

    An SQL92 condition is not evaluated.
    """
    if traces.copies(f"{DEAD_PREFIX}{group}", message.id):
        return DEAD
    if _is_retried(traces, group, message):
        return RETRIED
    members = traces.members(group)
    if members is not None and members.model == Model.BROADCASTING.value:
        return UNKNOWN
    committed = traces.offsets(group, message.queue.topic).get(message.queue, 0)
    if committed <= message.queue_offset:
        return OFFLINE if members is None else WAITING
    topic = message.queue.topic
    if members is None or topic not in members.subscriptions:
        return CONSUMED
    subscription = parse_subscription(topic, members.subscriptions[topic], 0, members.kinds[topic])
    return CONSUMED if subscription.matches_tag(message.tag) else FILTERED


def _is_retried(traces: Traces, group: str, message: ReceivedMessage) -> bool:
    """Return whether a copy is in the group's retries that the group has not consumed yet."""
    topic = f"{RETRY_PREFIX}{group}"
    copies = traces.copies(topic, message.id)
    if not copies:
        return False
    offsets = traces.offsets(group, topic)
    return any(offsets.get(copy.queue, 0) <= copy.queue_offset for copy in copies)
