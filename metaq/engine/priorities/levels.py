"""The partition of a message in a topic with priorities, where each partition is a level: the greater the more urgent."""

from collections.abc import Mapping

from metaq.engine.tables.topics import Topic, TopicTable
from metaq.engine.writing import Draft
from metaq.errors import MessageIllegal
from metaq.protocol.priority import priority_level
from metaq.protocol.properties import PRIORITY, SHARDING_KEY


def prioritize(topics: TopicTable, draft: Draft) -> None:
    """Move a message to the partition of its priority, whatever its sender asked for, if its topic has priorities.

    One with a key stays where its sender puts that key, and loses its priority. Raise ``MessageIllegal`` for a priority that is
    not a number from 0 up.
    """
    topic = topics.get(draft.topic)
    if topic is None or not topic.has_priorities:
        return
    draft.partition = priority_level(draft.properties, topic.partitions, draft.partition)
    if SHARDING_KEY in draft.properties:
        draft.properties.pop(PRIORITY, None)


def check_priority(topics: TopicTable, draft: Draft) -> None:
    """Raise ``MessageIllegal`` for a message whose priority could not be read later, if its topic has priorities."""
    topic = topics.get(draft.topic)
    if topic is not None and topic.has_priorities:
        priority_level(draft.properties, topic.partitions, draft.partition)


def partition_of_copy(topic: Topic, pairs: Mapping[str, str], asked: int) -> int:
    """Return the partition in which a message is put that was parked for partition ``asked``, of a topic that may have changed.

    A priority counts now; one that is none, since the topic had no priorities when it was sent, is the lowest.
    """
    partition = asked % topic.all_partitions  # the topic may have shrunk
    try:
        return priority_level(pairs, topic.partitions, partition) if topic.has_priorities else partition
    except MessageIllegal:
        return 0
