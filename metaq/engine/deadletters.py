"""Dead letters: messages that a group has given up, after too many retries; they stay for an operator to look at."""

import logging
from typing import Final

from metaq.engine.context import Context
from metaq.engine.tables.groups import Group
from metaq.engine.tables.topics import Topic
from metaq.engine.turn import Turns
from metaq.engine.writing import Draft, note
from metaq.errors import MetaqError
from metaq.message import DEAD_PREFIX
from metaq.protocol import properties
from metaq.protocol.remoting.codes import VERSION_WITH_MAX_RECONSUME

logger = logging.getLogger(__name__)

WAITS: Final = (properties.DELAY, properties.TRANSACTION)
"""Properties by which a message would wait before it reaches its topic."""


def most_retries(group: Group, version: int, wanted: int | None) -> int:
    """Return how often a message is redelivered: the client's number, if its version has that field, otherwise the group's."""
    return group.retry_max_times if wanted is None or version < VERSION_WITH_MAX_RECONSUME else wanted


def dead_letter(context: Context, group: Group, draft: Draft) -> Draft:
    """Return the message as a draft for a group's dead-letter topic, which is created if needed.

    It waits for nothing more: no delay, and no decision of a producer. It was consumed, so its transaction was committed long
    ago; some clients keep the mark of one in the copy.
    """
    topic = context.topics.get(group.dead_topic) or context.topics.put(Topic(group.dead_topic, 1, 1))
    pairs = {name: value for name, value in draft.properties.items() if name not in WAITS}
    return draft.moved(topic.name, 0, pairs)


def report_dead_letter(context: Context, turns: Turns, draft: Draft) -> None:
    """Count and log a dead letter that was staged in this turn, once it is in the dead-letter topic."""
    pairs, group = draft.properties, draft.topic.removeprefix(DEAD_PREFIX)
    message_id = pairs.get(properties.UNIQUE_KEY) or pairs.get(properties.ORIGIN_ID)
    origin, times, kept_in = pairs.get(properties.RETRY_TOPIC, ""), draft.reconsume_times, draft.topic

    def report(error: MetaqError | None) -> None:
        if error is not None:
            return  # its sender hears of it
        context.counters.dead_letter.add(1)
        logger.warning(
            "dead_letter group=%s topic=%s id=%s reconsume_times=%d kept_in=%s", group, origin, message_id, times, kept_in
        )

    note(turns, report)
