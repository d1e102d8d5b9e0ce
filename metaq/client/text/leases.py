"""The part of the text client that leases messages: pushed over a subscription, or popped one request at a time."""

from collections.abc import Callable, Sequence
from datetime import timedelta

from metaq.client.message import milliseconds
from metaq.client.text.connection import TextConnection
from metaq.client.text.leasing import PoppedMessage, pop
from metaq.client.text.requests import TextRequests, accepted, check_name, number_in
from metaq.client.text.subscription import TextSubscription
from metaq.protocol.text.commands import Ack, Nack, Pop, Subscribe
from metaq.protocol.text.ids import MessageId
from metaq.protocol.text.replies import NOT_FOUND
from metaq.protocol.text.writing import write_ack, write_nack


class LeaseRequests(TextRequests):
    """The requests of members of groups, on top of those that every client makes."""

    def subscribe(
        self,
        topic: str,
        group: str,
        *,
        ready: int = 1,
        invisible_s: float | None = None,
        partition: int | None = None,
        attribute: str | None = None,
        from_first: bool = True,
        owns: bool = False,
    ) -> TextSubscription:
        """Have messages of a topic pushed, over a connection of its own, until the subscription is closed.

        Args:
            topic: the topic, which must exist.
            group: the group; each message goes to one member of it, and comes again if that does not finish it.
            ready: messages that may be out and not finished, up to 10,000.
            invisible_s: the time in which a message must be finished, 1 s to 12 h; ``None``: a minute.
            partition: take messages of this partition only.
            attribute: take messages with this attribute only.
            from_first: begin at the oldest message, if the group is new; otherwise after the newest one.
            owns: have partitions of its own, which no other member of the group gets.

        Returns:
            The subscription, an iterator over messages.

        Raises:
            Refused: the broker refuses; ``text`` says why.
            ConnectionFailed: the connection broke.
            RequestTimeout: no answer in time.
        """
        for field, name in (("topic", topic), ("group", group), *((("attribute", attribute),) if attribute else ())):
            check_name(field, name)
        invisible_ms = None if invisible_s is None else round(1000 * invisible_s)
        command = Subscribe(
            topic=topic,
            group=group,
            ready=ready,
            invisible_ms=invisible_ms,
            from_first=from_first,
            partition=partition,
            attribute=attribute,
            owns=owns,
            name=None,
            with_crc=False,
            opaque="",
        )
        return TextSubscription(TextConnection(self._host, self._port, self.timeout_s, self._access), command, self.timeout_s)

    def pop(
        self,
        topic: str,
        group: str,
        most: int = 1,
        *,
        invisible: timedelta | None = None,
        wait: timedelta = timedelta(0),
        attribute: str | None = None,
        from_first: bool = True,
    ) -> Sequence[PoppedMessage]:
        """Lease up to ``most`` messages to a group; none when there is nothing.

        They stay leased whatever becomes of this client: ``ack`` and ``nack`` take their ids.

        Args:
            topic: the name of the topic.
            group: the name of the group.
            most: the most messages.
            invisible: how long they are leased; by default a minute.
            wait: how long to wait for the first.
            attribute: take messages with this attribute only.
            from_first: begin at the oldest message, if the group is new; otherwise after the newest one.

        Returns:
            The messages, each with the id by which it is finished.

        Raises:
            Refused: the broker refuses; ``text`` says why.
            ConnectionFailed: the connection broke.
            RequestTimeout: no answer in time.
        """
        for field, name in (("topic", topic), ("group", group), *((("attribute", attribute),) if attribute else ())):
            check_name(field, name)
        invisible_ms = None if invisible is None else milliseconds(invisible)
        command = Pop(topic, group, most, invisible_ms, milliseconds(wait), from_first, attribute, "")
        connection = TextConnection(self._host, self._port, self.timeout_s, self._access)
        try:
            return pop(connection, command, self.timeout_s)
        finally:
            connection.lose("the pop is over")

    def ack(self, topic: str, group: str, ids: Sequence[MessageId]) -> int:
        """Finish messages that a group has leased; return how many: those that were not finished, or given again, before.

        Args:
            topic: the name of the topic.
            group: the name of the group.
            ids: the ids of the messages.

        Raises:
            Refused: the broker refuses; ``text`` says why.
            ConnectionFailed: the connection broke; it may have been carried out.
            RequestTimeout: no answer in time; it may have been carried out.
        """
        return self._end(topic, group, lambda opaque: write_ack(Ack(tuple(ids), topic, group, str(opaque))))

    def nack(self, topic: str, group: str, ids: Sequence[MessageId], *, delay: timedelta | None = None) -> int:
        """Give messages back, to be given again at once or after a delay; return how many were leased.

        Args:
            topic: the name of the topic.
            group: the name of the group.
            ids: the ids of the messages.
            delay: the time until they come again; by default at once.

        Raises:
            Refused: the broker refuses; ``text`` says why.
            ConnectionFailed: the connection broke; it may have been carried out.
            RequestTimeout: no answer in time; it may have been carried out.
        """
        delay_ms = None if delay is None else milliseconds(delay)
        return self._end(topic, group, lambda opaque: write_nack(Nack(tuple(ids), delay_ms, False, topic, group, str(opaque))))

    def reject(self, topic: str, group: str, ids: Sequence[MessageId]) -> int:
        """Send messages to the dead letters of the group; return how many were leased.

        Args:
            topic: the name of the topic.
            group: the name of the group.
            ids: the ids of the messages.

        Raises:
            Refused: the broker refuses; ``text`` says why.
            ConnectionFailed: the connection broke; it may have been carried out.
            RequestTimeout: no answer in time; it may have been carried out.
        """
        return self._end(topic, group, lambda opaque: write_nack(Nack(tuple(ids), None, True, topic, group, str(opaque))))

    def _end(self, topic: str, group: str, write: Callable[[int], bytes]) -> int:
        check_name("topic", topic)
        check_name("group", group)
        reply = self._ask(write)
        return 0 if reply.code == NOT_FOUND else number_in(accepted(reply))
