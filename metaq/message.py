"""The types that every layer shares: the three offsets, partitions, messages and the result of a put."""

import enum
from typing import Final, NamedTuple, NewType

LogOffset = NewType("LogOffset", int)
"""Byte offset in the commit log of one broker."""

QueueOffset = NewType("QueueOffset", int)
"""Ordinal of a message in its partition: 0, 1, 2, …"""

TextPosition = NewType("TextPosition", int)
"""Byte position of a message in its partition as text readers count: the encoded sizes of all messages before it."""

MAX_PARTITIONS: Final = 1024
"""The most partitions that a topic may have on one broker."""
LONGEST_WINDOW_MS: Final = 7 * 24 * 3_600_000
"""The longest window in which a topic knows the ids of its messages."""

RETRY_PREFIX: Final = "%RETRY%"
DEAD_PREFIX: Final = "%DLQ%"
"""The topics of a group, for messages to consume again and for those that were given up, have its name after these."""
DEFAULT_TOPIC: Final = "TBW102"
"""The template of topics that clients create by sending to them: its route names the brokers that do so."""
SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"
HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
HALF_OP_TOPIC: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
GIVEN_UP_TOPIC: Final = "TRANS_CHECK_MAX_TIME_TOPIC"
"""Transactional messages that were never decided."""
OFFSETS_TOPIC: Final = "METAQ_SYS_OFFSETS"
"""Changes of consumer offsets (``metaq.engine.offsets.offsetlog``)."""
TRANSACTIONS_TOPIC: Final = "METAQ_SYS_TRANSACTIONS"
"""Marks of transactions, and the messages that transactions park (``metaq.tx``)."""
EPOCHS_TOPIC: Final = "METAQ_SYS_EPOCHS"
"""The epochs of the log: which replica was master when (``metaq.store.copies.epochs``)."""
LOCKS_TOPIC: Final = "METAQ_SYS_LOCKS"
"""Locks of ordered consumers (``metaq.engine.locklog``)."""
LEASES_TOPIC: Final = "METAQ_SYS_LEASES"
"""What becomes of messages that groups lease (``metaq.leases.events``)."""
TIMERS_TOPIC: Final = "METAQ_SYS_TIMERS"
"""Messages that are delivered at a time of their own, and what became of them (``metaq.timers.records``)."""
HISTORY_TOPIC: Final = "METAQ_SYS_OFFSET_HISTORY"
"""The history of all groups' progress (``metaq.engine.offsets.offsethistory``)."""

INTERNAL_TOPICS: Final = frozenset(
    (
        SCHEDULE_TOPIC,
        HALF_TOPIC,
        HALF_OP_TOPIC,
        GIVEN_UP_TOPIC,
        OFFSETS_TOPIC,
        TRANSACTIONS_TOPIC,
        EPOCHS_TOPIC,
        LOCKS_TOPIC,
        LEASES_TOPIC,
        TIMERS_TOPIC,
        HISTORY_TOPIC,
    )
)
"""The broker's own topics: clients cannot send to them, text readers cannot read them, and their messages have no key index."""


class Durability(enum.StrEnum):
    """The failures that an acknowledged message survives."""

    MEMORY = "memory"
    """In the page cache: survives a killed process, not a power cut."""

    DISK = "disk"
    """Synced by group commit: survives a power cut."""

    REPLICA = "replica"
    """Held by all in-sync replicas: survives the loss of the master."""

    DISK_REPLICA = "disk+replica"
    """Both: synced on the master and held by all in-sync replicas."""

    @property
    def on_disk(self) -> bool:
        """True when a put waits for the master's sync."""
        return self in {Durability.DISK, Durability.DISK_REPLICA}

    @property
    def on_replicas(self) -> bool:
        """True when a put waits for the in-sync replicas."""
        return self in {Durability.REPLICA, Durability.DISK_REPLICA}


class TopicPartition(NamedTuple):
    """One partition of one topic on one broker."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class GroupPartition(NamedTuple):
    """A consumer group in one partition of a topic on one broker: it has one offset there, and one set of leases."""

    group: str
    topic: str
    partition: int


class MessageQueue(NamedTuple):
    """One partition of one topic on one broker of a cluster.

    Queues sort in the order that all clients use when they assign queues to the members of a group.
    """

    topic: str
    broker_name: str
    partition: int

    def __str__(self) -> str:
        """Return the text that Java clients make of a queue; consistent hashing hashes it."""
        return f"MessageQueue [topic={self.topic}, brokerName={self.broker_name}, queueId={self.partition}]"


class Message(NamedTuple):
    """A message as a text reader gets it (specs: text protocol, section 2.1)."""

    id: int
    """A signed 64-bit number, unique on its broker."""
    flag: int
    """32 bits, as stored; bit 0 is set when there is an attribute."""
    attribute: str | None
    """``None`` when there is none, which is not the same as an empty one."""
    body: bytes
    position: TextPosition
    """The position in the partition at which the message begins."""
    next_position: TextPosition
    """The position at which the next message begins, which is the one to ask for next."""
    error: Exception | None = None
    """The reason why a compressed body could not be inflated; ``body`` is then as it was put."""


class PutResult(NamedTuple):
    """The place of an acknowledged message."""

    id: int
    partition: int
    position: TextPosition
    """-1 for a delayed message, which gets a position when it is delivered."""
    handle: str | None = None
    """The handle by which ``TextClient.cancel`` cancels the message, if it is delayed."""
