"""The words that every layer shares: the three offsets, partitions, messages and what a send returns."""

import enum
from typing import Final, NamedTuple, NewType

LogOffset = NewType("LogOffset", int)
"""Byte offset in the commit log of one broker."""

QueueOffset = NewType("QueueOffset", int)
"""Ordinal of a message in its partition: 0, 1, 2, …"""

TextPosition = NewType("TextPosition", int)
"""Byte position of a message in its partition as text readers count: the encoded sizes of all messages before it."""

MAX_PARTITIONS: Final = 1024
"""Of a topic on one broker."""

INTERNAL_TOPICS: Final = frozenset(
    (
        "SCHEDULE_TOPIC_XXXX",
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        "TRANS_CHECK_MAX_TIME_TOPIC",
        "METAQ_SYS_OFFSETS",
        "METAQ_SYS_TRANSACTIONS",
        "METAQ_SYS_EPOCHS",
        "METAQ_SYS_LOCKS",
        "METAQ_SYS_OFFSET_HISTORY",
    )
)
"""Topics of the broker itself: no client sends to them, no text reader reads them, nothing in them is found by key."""


class Durability(enum.StrEnum):
    """What an acknowledged message survives."""

    MEMORY = "memory"
    """In the page cache: survives a killed process, not a power cut."""

    DISK = "disk"
    """Synced by group commit: survives a power cut."""

    REPLICA = "replica"
    """Held by all replicas in sync: survives the loss of the master."""

    DISK_REPLICA = "disk+replica"
    """Both: synced here, and held by all replicas in sync."""

    @property
    def on_disk(self) -> bool:
        """Whether the master's sync is waited for."""
        return self in {Durability.DISK, Durability.DISK_REPLICA}

    @property
    def on_replicas(self) -> bool:
        """Whether the replicas in sync are waited for."""
        return self in {Durability.REPLICA, Durability.DISK_REPLICA}


class TopicPartition(NamedTuple):
    """One partition of one topic on one broker."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class MessageQueue(NamedTuple):
    """One partition of one topic on one broker of a cluster; sorted as clients sort them before they share them out."""

    topic: str
    broker_name: str
    partition: int

    def __str__(self) -> str:
        """As Java writes it, which consistent hashing makes use of."""
        return f"MessageQueue [topic={self.topic}, brokerName={self.broker_name}, queueId={self.partition}]"


class Message(NamedTuple):
    """A message as a text reader gets it (specs: text protocol, section 2.1)."""

    id: int
    """Signed 64 bit; unique on its broker."""
    flag: int
    """32 bits as stored; bit 0 says that an attribute is present."""
    attribute: str | None
    """``None`` when there is none, which is not the same as an empty one."""
    body: bytes
    position: TextPosition
    """Where the message begins in its partition."""
    next_position: TextPosition
    """Where the message after it begins: what to ask for next."""
    error: Exception | None = None
    """Why the body is as it was put, when it should be inflated and cannot be."""


class PutResult(NamedTuple):
    """Where an acknowledged message is."""

    id: int
    partition: int
    position: TextPosition
