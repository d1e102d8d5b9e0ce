"""Administration: messages by key, id and time, and dead letters."""

import itertools
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Final

from metaq.address import Address
from metaq.client import checks
from metaq.client.admin.topics import TopicAdmin
from metaq.client.admin.views import read_object
from metaq.client.connecting.transport import RemotingRequest, successful
from metaq.client.consuming.pull import PullConsumer
from metaq.client.consuming.records import decode_messages
from metaq.client.message import ReceivedMessage, SendResult, properties_text, unix_ms
from metaq.client.sending.sending import Outgoing, QueueChoice, deliver, send_fields
from metaq.errors import BadRequest, ClientError, RouteNotFound
from metaq.message import DEAD_PREFIX, RETRY_PREFIX, MessageQueue
from metaq.protocol.ids import decode_offset_id
from metaq.protocol.properties import DEDUPE_ID, DELAY, RETRY_TOPIC, UNIQUE_KEY
from metaq.protocol.remoting import headers
from metaq.protocol.remoting.attributes import DISCARDED, discarding
from metaq.protocol.remoting.codes import INNER_PRODUCER, Request, Response
from metaq.protocol.remoting.headers import Int32
from metaq.protocol.spans import Spans

TOOLS_GROUP: Final = "TOOLS_CONSUMER"
_MOST_FOUND: Final = 64
_EVER_MS: Final = (1 << 63) - 1
_POLL_S: Final = 5.0


class MessageAdmin(TopicAdmin):
    """The administration of messages, on top of that of topics, whose brokers have them."""

    def query_by_key(
        self,
        topic: str,
        key: str,
        *,
        most: int = 32,
        begin: datetime | None = None,
        end: datetime | None = None,
    ) -> list[ReceivedMessage]:
        """Return the newest ``most`` messages of a topic that have a key, the oldest first. Each broker looks at 64 at most.

        Args:
            topic: the name of the topic.
            key: the key.
            most: the most messages to return.
            begin: leave out messages that were stored before this time.
            end: leave out messages that were stored after this time.

        Raises:
            BadRequest: an argument is invalid.
            RouteNotFound: no registry answers, or no broker serves the topic; ``reason`` says why.
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        checks.text("key", key)
        checks.number("most", most, 1)
        found = self._query(topic, key, most, _ms(begin, 0), _ms(end, _EVER_MS), {})
        return [message for message in found if key in message.keys][-most:]

    def query_by_id(self, topic: str, message_id: str) -> list[ReceivedMessage]:
        """Return the messages with the id that their sender made: usually one, or the deliveries of one message.

        Args:
            topic: the name of the topic.
            message_id: the ``id`` of the message.

        Raises:
            RouteNotFound: no registry answers, or no broker serves the topic; ``reason`` says why.
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        found = self._query(topic, message_id, _MOST_FOUND, 0, _EVER_MS, {"_UNIQUE_KEY_QUERY": "true"})
        return [message for message in found if message.id == message_id]

    def query_by_offset_id(self, offset_id: str, *, address: str | None = None) -> ReceivedMessage | None:
        """Return the message with the id that its broker made; ``None`` when that broker does not have it (any more).

        Args:
            offset_id: the ``offset_id`` of the message.
            address: the broker's address, ``host:port``; by default the one in the id, which is 0.0.0.0 with the port when the
                broker advertises a name or IPv6.

        Raises:
            BadRequest: it is no such id.
            RouteNotFound: no registry answers.
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        where = decode_offset_id(offset_id)
        address = address or str(Address(where.address, where.port))
        known = {broker.address: broker.name for broker in self.brokers()}
        request = RemotingRequest.of(Request.VIEW_MESSAGE_BY_ID, headers.ViewMessage(where.log_offset))
        response = self._core.transport.call(address, request, self._core.deadline())
        if response.code == Response.SYSTEM_ERROR:
            return None
        found = decode_messages(successful(response).body, known.get(address, ""), most=self._core.max_inflated_bytes)[0]
        return found if decode_offset_id(found.offset_id) == where else None

    def query_by_time(self, topic: str, begin: datetime, end: datetime | None = None) -> Iterator[ReceivedMessage]:
        """Yield the messages of a topic that were stored from ``begin`` on and before ``end``, partition after partition.

        Args:
            topic: the name of the topic.
            begin: the time of the first message.
            end: the time behind the last message; by default now.

        Raises:
            RouteNotFound: no registry answers, or no broker serves the topic; ``reason`` says why.
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
            ClientError: a broker gave none for 5 s where there are some.
        """
        for queue in self._core.routes.readable(topic, self._core.deadline()):
            deadline = self._core.deadline()
            first = self._ends.at_time(queue, _ms(begin, 0), deadline)
            behind = self._ends.end(queue, deadline) if end is None else self._ends.at_time(queue, _ms(end, 0), deadline)
            yield from self.read(queue, first, behind)

    def dead_letters(self, group: str, *, most: int | None = None) -> list[ReceivedMessage]:
        """Return a group's dead letters, partition after partition, the oldest first, and at most ``most`` of them.

        Args:
            group: the name of the group.
            most: the most messages to return; by default all.

        Raises:
            RouteNotFound: no registry answers.
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
            ClientError: a broker gave none for 5 s where there are some.
        """
        found: list[ReceivedMessage] = []
        for queue in self._dead_queues(group):
            deadline, discarded = self._core.deadline(), self._discarded(queue)
            letters = self.read(queue, self._ends.begin(queue, deadline), self._ends.end(queue, deadline))
            left = (letter for letter in letters if letter.queue_offset not in discarded)
            found += itertools.islice(left, None if most is None else most - len(found))
        return found

    def count_dead_letters(self, group: str) -> int:
        """Return how many dead letters a group has.

        Args:
            group: the name of the group.

        Raises:
            RouteNotFound: no registry answers.
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        count = 0
        for queue in self._dead_queues(group):
            deadline = self._core.deadline()
            begin, end = self._ends.begin(queue, deadline), self._ends.end(queue, deadline)
            count += end - begin - (self._discarded(queue).count(begin, end) if end > begin else 0)
        return count

    def discard_dead_letters(self, dead_letters: Iterable[ReceivedMessage]) -> None:
        """Discard dead letters: they are not shown, counted or sent again any more.

        Args:
            dead_letters: some of ``dead_letters``.

        Raises:
            BadRequest: one is not a dead letter, or a broker has no room for them: it has for some 400 spans of letters that
                follow each other.
            RouteNotFound: no registry answers.
            Refused: a broker refuses; ``text`` says why. Together with earlier ones it may have no room for them.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        chosen: dict[MessageQueue, list[int]] = {}
        for letter in dead_letters:
            if not letter.queue.topic.startswith(DEAD_PREFIX):
                raise BadRequest(f"{letter!r} is not a dead letter")
            chosen.setdefault(letter.queue, []).append(letter.queue_offset)
        for queue, offsets in chosen.items():
            address, begin = self._core.master(queue.broker_name), self._ends.begin(queue, self._core.deadline())
            known = read_object(self._ask(address, Request.GET_TOPIC_CONFIG, headers.TopicOnly(queue.topic)).body)
            partitions = known["readQueueNums"], known["writeQueueNums"]
            header = discarding(queue.topic, partitions, known["perm"], Spans.of(offsets, begin))
            self._ask(address, Request.UPDATE_AND_CREATE_TOPIC, header)

    def _dead_queues(self, group: str) -> tuple[MessageQueue, ...]:
        try:
            return self._core.routes.readable(f"{DEAD_PREFIX}{group}", self._core.deadline())
        except RouteNotFound as error:
            if error.retriable:
                raise
            return ()  # the first dead letter creates the topic

    def _discarded(self, queue: MessageQueue) -> Spans:
        """Return the offsets of the dead letters in a queue that operators have discarded one by one."""
        request = RemotingRequest.of(Request.GET_TOPIC_CONFIG, headers.TopicOnly(queue.topic))
        answer = self._core.transport.call(self._core.master(queue.broker_name), request, self._core.deadline())
        if answer.code in (Response.REQUEST_CODE_NOT_SUPPORTED, Response.TOPIC_NOT_EXIST):  # not metaq, or just deleted
            return Spans()
        attributes = read_object(successful(answer).body).get("attributes") or {}
        return Spans.read(attributes.get(DISCARDED, ""))

    def replay(self, group: str, dead_letter: ReceivedMessage) -> SendResult:
        """Send a copy of a dead letter to its group, as if for the first time and under an id of its own.

        It goes to the group's retry topic: members that pull get it, consumers that lease do not.

        Args:
            group: the group that gets it.
            dead_letter: one of ``dead_letters``.

        Returns:
            The place and the status of the copy.

        Raises:
            BadRequest: it is not a dead letter.
            SendFailed: every try failed.
            Refused: a broker does not take it.
            RequestTimeout: no answer in time; it may be stored.
            RouteNotFound: no registry answers.
        """
        topic = f"{RETRY_PREFIX}{group}"
        origin = dead_letter.properties.get(RETRY_TOPIC)
        if origin is None:
            raise BadRequest(f"{dead_letter!r} does not say which topic it came from; it may not be a dead letter")
        properties = {name: value for name, value in dead_letter.properties.items() if name not in (DELAY, DEDUPE_ID)}
        properties[UNIQUE_KEY] = self._core.unique_ids.next()  # else it would be taken for a duplicate of the first
        body, sys_flag = dead_letter._packed()
        fields = send_fields(INNER_PRODUCER, topic, properties_text(properties), sys_flag, dead_letter.flag)
        outgoing = Outgoing(topic, fields, body, Request.SEND_MESSAGE_V2, (properties[UNIQUE_KEY],), None)
        return deliver(
            self._core.transport, QueueChoice(self._core.routes, self._core.health), outgoing, self._core.deadline()
        )[0]

    def read(self, queue: MessageQueue, first: int, end: int) -> Iterator[ReceivedMessage]:
        """Yield the messages of a queue from offset ``first`` on and before ``end``.

        Args:
            queue: the queue.
            first: the offset of the first message.
            end: the offset behind the last message.

        Raises:
            ClientError: the broker gave none for 5 s where there are some.
        """
        with PullConsumer(self._core, queue.topic, TOOLS_GROUP) as consumer:
            consumer.read_from(queue, first)
            while consumer.position(queue) < end:
                messages = consumer.poll(timeout_s=_POLL_S)
                if not messages and consumer.position(queue) < end:
                    raise ClientError(
                        f"{queue} returned nothing for {_POLL_S} s at {consumer.position(queue)}, before its end {end}"
                    )
                yield from (message for message in messages if message.queue_offset < end)

    def _query(
        self, topic: str, key: str, most: int, begin_ms: int, end_ms: int, marks: dict[str, str]
    ) -> list[ReceivedMessage]:
        header = headers.QueryMessage(topic, key, Int32(most), begin_ms, end_ms)
        request = RemotingRequest(Request.QUERY_MESSAGE, {**headers.encode_header(header), **marks})
        found: list[ReceivedMessage] = []
        for broker_name in sorted({data.broker_name for data in self.route(topic).queues}):
            response = self._core.transport.call(self._core.master(broker_name), request, self._core.deadline())
            if response.code != Response.QUERY_NOT_FOUND:
                found += decode_messages(successful(response).body, broker_name, most=self._core.max_inflated_bytes)
        return sorted(found, key=lambda message: (message.store_ms, message.queue))


def _ms(when: datetime | None, otherwise: int) -> int:
    return otherwise if when is None else unix_ms(when)
