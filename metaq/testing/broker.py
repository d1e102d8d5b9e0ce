"""The in-memory broker, as tests use it."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Final

from metaq.client.client import in_process
from metaq.client.message import ReceivedMessage
from metaq.message import DEAD_PREFIX, GroupPartition, MessageQueue
from metaq.protocol.remoting import headers
from metaq.protocol.remoting.adminbodies import encode_offsets
from metaq.protocol.remoting.codes import Request
from metaq.testing.handlers import DEFAULT_PARTITIONS, RequestHandlers
from metaq.testing.log import BROKER_NAME

_numbers: Final = itertools.count(1)


class InMemoryBroker(RequestHandlers):
    """A broker and its registry in one; made by ``metaq.testing.broker``. Threads may share it."""

    def create_topic(self, topic: str, partitions: int = DEFAULT_PARTITIONS) -> None:
        """Create a topic, or give it more partitions. Sends create topics, too.

        Args:
            topic: the name of the topic.
            partitions: how many partitions it shall have.

        Raises:
            BadRequest: an argument is invalid.
        """
        self._create(topic, partitions)

    def messages(self, topic: str) -> list[ReceivedMessage]:
        """Return the messages that are stored for a topic, in the order of arrival.

        Args:
            topic: the name of the topic.
        """
        with self._guard:
            return self._log.messages(topic)

    def dead_letters(self, group: str, *, most: int | None = None) -> list[ReceivedMessage]:
        """Return a group's dead letters, the oldest first, and at most ``most`` of them; compare ``Admin.dead_letters``.

        Args:
            group: the name of the group.
            most: the most messages to return; by default all.
        """
        return self.messages(f"{DEAD_PREFIX}{group}")[:most]

    @property
    def delayed(self) -> int:
        """The number of messages that wait until they are due: delayed ones and those to be delivered again."""
        with self._guard:
            return self._log.parked

    @property
    def now(self) -> datetime:
        """The time by the broker's clock, which ``advance`` moves; with a time zone, as ``Producer.send`` takes it."""
        with self._guard:
            return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=self._log.now_ms())

    def advance(self, seconds: float) -> None:
        """Move the clock forward and deliver the delayed messages that are due by then.

        Args:
            seconds: how far.
        """
        with self._guard:
            self._log.advance(seconds)
            self._wake()

    @property
    def undecided(self) -> list[ReceivedMessage]:
        """The half messages whose producers have not yet committed or rolled them back, the oldest first."""
        with self._guard:
            return self._halves.messages()

    def check_transactions(self) -> None:
        """Ask a producer of its group about each undecided half message: at each call the next producer of the group.

        Clients answer later, on threads of their own.
        """
        with self._guard:
            turn = next(self._checks)
            for half in self._halves.undecided():
                if asked := self._producers(half.group):
                    asked[turn % len(asked)].ask(Request.CHECK_TRANSACTION_STATE, half.question, half.record)

    def committed(self, group: str, topic: str) -> dict[int, int]:
        """Return the offsets that a group has committed for a topic, by partition.

        Args:
            group: the name of the group.
            topic: the name of the topic.
        """
        with self._guard:
            return self._offsets.of(group, topic)

    def reset_offsets(self, group: str, topic: str, offset: int = 0) -> None:
        """Set a group's offset in all partitions of a topic, and make its members continue from there.

        Args:
            group: the name of the group.
            topic: the name of the topic.
            offset: where all partitions continue. An offset that a partition does not have becomes its nearer end.
        """
        with self._guard:
            table = {}
            for number, partition in enumerate(self._log.topics.get(topic, ())):
                there = min(max(offset, partition.first), partition.end)
                self._offsets.reset(GroupPartition(group, topic, number), there)
                self._leases.reset(group, topic, number)
                table[MessageQueue(topic, BROKER_NAME, number)] = there
            for session in self._group(group):
                session.ask(Request.RESET_CONSUMER_CLIENT_OFFSET, headers.ResetOffset(topic, group, 0), encode_offsets(table))
            self._wake()


@contextmanager
def broker(*, partitions: int = DEFAULT_PARTITIONS) -> Iterator[InMemoryBroker]:
    """Run an empty broker during a ``with`` block.

    Args:
        partitions: how many partitions a topic gets that a send creates.

    Returns:
        The broker, in a context manager.
    """
    found = InMemoryBroker(f"memory://{next(_numbers)}", partitions)
    in_process[found.address] = found._connect
    try:
        yield found
    finally:
        del in_process[found.address]
