"""The partition of a send: whether its sender may send there, and whether its topic takes messages or has to be created."""

import random
from typing import Final

from metaq.config import Settings
from metaq.engine.context import Context
from metaq.engine.tables.topics import FORBIDDEN, Topic
from metaq.engine.turn import Turns
from metaq.errors import AccessDenied, MessageIllegal, UnknownTopic, WrongPartition
from metaq.message import DEFAULT_TOPIC, RETRY_PREFIX
from metaq.protocol.remoting.codes import INHERIT, WRITE
from metaq.protocol.remoting.headers import SendMessage
from metaq.server.access.permissions import Action, Principal, allowed, demand, denied
from metaq.server.remoting.session import RemotingSession
from metaq.store.queues.consumequeue import ConsumeQueue

BESIDE_BODY: Final = 33 * 1024
"""Bytes of a record besides the body: at most 32 KiB of properties and less than 1 KiB of everything else."""


class Partitions:
    """The partitions to which clients send."""

    def __init__(self, context: Context, turns: Turns) -> None:
        self._context = context
        self._turns = turns
        self._store = context.store
        self.configure(context.settings)
        self.known: dict[tuple[str, str], ConsumeQueue] = {}
        """By topic and number as sent: partitions that take messages; valid after ``refresh``, until control is yielded."""
        self._known_for = -1  # the version of the topic table for which known is valid

    def configure(self, settings: Settings) -> None:
        """Take over the limit for the size of a message."""
        self.room = settings.segment_bytes - BESIDE_BODY
        """The most bytes of bodies that a segment of the log has room for."""
        self.most_bytes = min(settings.max_message_bytes, self.room)
        """The most bytes of a body."""

    def admit(self, session: RemotingSession, header: SendMessage, body: bytes) -> ConsumeQueue:
        """Return the partition for a message. Raise ``MetaqError`` when the message cannot be taken."""
        self.refresh()
        queue = self._partition(session, header)
        if len(body) > self.most_bytes:
            raise MessageIllegal(f"a body of {len(body)} bytes is longer than {self.most_bytes} (max_message_bytes)")
        return queue

    def refresh(self) -> None:
        """Raise the reason why no message at all can be taken now, if there is one.

        Forget known partitions when topics have changed.
        """
        if self._turns.overloaded or not self._store.writable:
            self._turns.check_load()
            self._store.check_writable()
        version = self._context.topics.version
        if self._known_for != version:
            self.known.clear()
            self._known_for = version

    def _partition(self, session: RemotingSession, header: SendMessage) -> ConsumeQueue:
        name = header.topic
        if name in FORBIDDEN:
            raise AccessDenied(f"nobody may send to the topic {name}")
        if not allowed(session.principal, Action.PUBLISH, name):
            raise denied(session.principal, Action.PUBLISH, name)
        topic = self._context.topics.get(name) or self._create(session.principal, header)
        self._context.topics.check(topic, WRITE)
        number: int = header.queue_id
        if number < 0:
            number = random.randrange(topic.partitions) if topic.partitions else topic.all_partitions
        if number >= topic.all_partitions:
            raise WrongPartition(f"the topic {name} has {topic.partitions} partitions, and {number} is not one of them")
        queue = self._store.queue(name, number)
        # in a topic with priorities the properties decide, which only the slow path reads
        if number == header.queue_id and not name.startswith(RETRY_PREFIX) and not topic.has_priorities:
            self.known[name, str(number)] = queue
        return queue

    def _create(self, principal: Principal, header: SendMessage) -> Topic:
        """Create the topic to which a client sends, and return it.

        Raise ``UnknownTopic`` with the reason why that is not possible.
        """
        topics, name = self._context.topics, header.topic
        template = topics.get(header.default_topic)
        reason = f"there is no template topic {header.default_topic}"
        if header.default_topic == DEFAULT_TOPIC and not self._context.settings.auto_create_topics:
            reason = "sending does not create topics (auto_create_topics is false)"
        elif template is not None and template.permission & INHERIT:
            demand(principal, Action.CREATE, name)
            partitions = min(max(0, header.default_topic_queue_nums), template.partitions)
            return topics.put(Topic(name, partitions, partitions, template.permission & ~INHERIT))
        elif template is not None:
            reason = f"the topic {header.default_topic} is not a template"
        if name.startswith(RETRY_PREFIX):
            return topics.put(Topic(name, 1, 1))
        raise UnknownTopic(f"the topic {name} does not exist and is not created: {reason}")
