"""Producers, which send messages one by one, in batches, or as requests and replies."""

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, Final, Generic, TypedDict

from metaq.client import checks, intercepting
from metaq.client.connecting.core import Core
from metaq.client.intercepting import Sent
from metaq.client.message import (
    CORRELATION_ID,
    MESSAGE_TYPE,
    TTL,
    Body,
    OutgoingMessage,
    ReceivedMessage,
    SendResult,
    delay_properties,
    message_properties,
    priority_properties,
)
from metaq.client.retries import Retry, check_retry
from metaq.client.sending.asynchronous import AsyncSend, SendFuture
from metaq.client.sending.batches import compose_batch, outgoing_batch, several, with_own_properties
from metaq.client.sending.gathering import Gatherer
from metaq.client.sending.groupproducer import GroupProducer
from metaq.client.sending.replies import Replies
from metaq.client.sending.sending import (
    MAX_BODY_BYTES,
    NOT_ONCE,
    SEND_RETRY,
    Once,
    Outgoing,
    QueueChoice,
    Sending,
    check_size,
    compose,
    deliver,
    tell,
)
from metaq.client.serializers import Serializer, check_serializer, decoded, outgoing_of, serialized
from metaq.errors import BadRequest
from metaq.message import MessageQueue
from metaq.protocol.properties import CLUSTER, DEDUPE_ID, REPLY_TO, SHARDING_KEY
from metaq.protocol.remoting.codes import Request

DEFAULT_GROUP: Final = "metaq_producer"
BATCH_BYTES: Final = 64 * 1024
"""The default size from which on a batch of lingering messages is sent."""
_NONE: Final[Mapping[str, str]] = MappingProxyType({})


class ProducerOptions(TypedDict, total=False):
    """The options of a producer, whatever it sends; see ``Client.producer``."""

    linger_ms: int
    batch_bytes: int
    retry: Retry | None


class Producer(GroupProducer, Generic[Body]):
    """A sender of messages; made by ``Client.producer``. Threads may share it.

    A send may make several tries within its time limit, each at another broker if there is one, and up to three that may have
    reached a broker, or as many as ``retry`` says. After a time-out there is no further try, because the message may be stored.
    A message can be stored twice all the same; consumers must detect that by keys of their own.
    """

    def __init__(
        self,
        core: Core,
        replies: Replies,
        group: str = DEFAULT_GROUP,
        *,
        linger_ms: int = 0,
        batch_bytes: int = BATCH_BYTES,
        serializer: Serializer[Body] | None = None,
        retry: Retry | None = None,
    ) -> None:
        check_retry(retry)
        check_serializer("serializer", serializer)
        checks.number("linger_ms", linger_ms)
        checks.number("batch_bytes", batch_bytes, 1, MAX_BODY_BYTES)
        super().__init__(core, group)
        self._replies = replies
        self._serializer = serializer
        self._choice = QueueChoice(core.routes, core.health, SEND_RETRY if retry is None else retry)
        self._gatherer = Gatherer(core, self._choice, group, linger_ms / 1000, batch_bytes) if linger_ms else None

    def close(self) -> None:
        """Send what lingers and wait until that is answered, then unregister the producer; the client stays open."""
        if self._gatherer is not None:
            self._gatherer.close()
        super().close()

    def send(
        self,
        topic: str,
        body: Body,
        *,
        tag: str | None = None,
        keys: str | Iterable[str] = (),
        properties: Mapping[str, str] = _NONE,
        ordering_key: str | None = None,
        delay_level: int = 0,
        delay: timedelta | None = None,
        deliver_at: datetime | None = None,
        priority: int | None = None,
        dedupe_id: str | None = None,
        or_elsewhere: bool = False,
        timeout_s: float | None = None,
    ) -> SendResult:
        """Send one message and wait until a broker has accepted it.

        Args:
            topic: the topic; it need not exist if brokers create topics on first send.
            body: the body, or with a ``serializer`` the value; from 4 KiB on it is stored compressed, if that makes it shorter.
            tag: the tag by which consumers can filter.
            keys: keys by which the message can be found; several, or one text with blanks between them.
            properties: further names and values.
            ordering_key: messages with the same key go to the same partition, one after the other.
            delay_level: 1 to 18 for 1 s, 5 s, 10 s, 30 s, 1 to 10 min, 20 min, 30 min, 1 h, 2 h; 0 for none.
            delay: the time after which it is delivered; the result then has a ``handle`` for ``Client.cancel``.
            deliver_at: instead of ``delay``, the time at which it is delivered; with a time zone. One that has passed is now.
            priority: 0 and more, the greater the more urgent; counts in a topic with priorities, unless there is an
                ``ordering_key``.
            dedupe_id: an id by which brokers know the message: a topic with a window (``dedupe_window_ms``) stores only one of
                the messages with it. Sends with one id go to one broker, and wait while it has no master; to another one only
                when that has refused the message.
            or_elsewhere: with ``dedupe_id``, go to another broker also when the first gave no answer or has no master: it may
                be stored twice.
            timeout_s: the time limit of the whole call; by default the client's.

        Returns:
            The ids, the place and the status of the stored message.

        Raises:
            RouteNotFound: there is nowhere to send it; ``reason`` says why.
            SendFailed: every try failed, each for a reason of its own.
            BrokerBusy: the brokers are overloaded; ``retry_after_s`` says when to try again.
            Refused: a broker does not take this message, and others would not either.
            RequestTimeout: no answer in time; the message may be stored.
            BadRequest: an argument is invalid.
        """
        deadline = self._core.deadline(timeout_s)
        data: Any = body
        if self._serializer is not None:
            data, properties = serialized(self._serializer, body, properties)
        own = _own(delay_level, delay, deliver_at, priority)
        once = NOT_ONCE if dedupe_id is None else Once(dedupe_id, or_elsewhere)
        pairs = self._properties(topic, data, tag, keys, properties, own, ordering_key, once)
        return self._send_one(topic, data, pairs, deadline, ordering_key, once)

    def send_async(
        self,
        topic: str,
        body: Body,
        *,
        tag: str | None = None,
        keys: str | Iterable[str] = (),
        properties: Mapping[str, str] = _NONE,
        ordering_key: str | None = None,
        delay_level: int = 0,
        delay: timedelta | None = None,
        deliver_at: datetime | None = None,
        priority: int | None = None,
        dedupe_id: str | None = None,
        or_elsewhere: bool = False,
        timeout_s: float | None = None,
    ) -> Future[SendResult]:
        """Send one message like ``send``, without waiting: the future gets the result or the error.

        The first send to a topic waits for its route. Callbacks of the future run on a few threads of the client; they may
        send, but should not block for long.

        Args:
            topic: the topic; it need not exist if brokers create topics on first send.
            body: the body, or with a ``serializer`` the value; from 4 KiB on it is stored compressed, if that makes it shorter.
            tag: the tag by which consumers can filter.
            keys: keys by which the message can be found; several, or one text with blanks between them.
            properties: further names and values.
            ordering_key: messages with the same key go to the same partition, one after the other.
            delay_level: 1 to 18 for 1 s, 5 s, 10 s, 30 s, 1 to 10 min, 20 min, 30 min, 1 h, 2 h; 0 for none.
            delay: the time after which it is delivered.
            deliver_at: instead of ``delay``, the time at which it is delivered; with a time zone.
            priority: 0 and more, the greater the more urgent, in a topic with priorities.
            dedupe_id: an id under which a topic with a window stores only one message.
            or_elsewhere: with ``dedupe_id``, go to another broker also when the first gave no answer.
            timeout_s: the time limit of the whole call; by default the client's.

        Raises:
            RouteNotFound: there is nowhere to send it; ``reason`` says why.
            BadRequest: an argument is invalid.
        """
        deadline = self._core.deadline(timeout_s)
        data: Any = body
        if self._serializer is not None:
            data, properties = serialized(self._serializer, body, properties)
        own = _own(delay_level, delay, deliver_at, priority)
        once = NOT_ONCE if dedupe_id is None else Once(dedupe_id, or_elsewhere)
        pairs = self._properties(topic, data, tag, keys, properties, own, ordering_key, once)
        sent = intercepting.sending(self._core.id, self.group, topic, (pairs,))
        future = SendFuture(self._core.scheduler, sent)
        gatherer = self._gatherer
        try:
            if gatherer is not None:
                gathers = not own and dedupe_id is None
                if gathers and gatherer.add(topic, data, pairs, ordering_key, deadline, future):
                    return future
                gatherer.flush(topic)
            outgoing = compose(self.group, topic, data, pairs, ordering_key=ordering_key, once=once)
        except BaseException as error:
            sent(error)
            raise
        AsyncSend(self._core, Sending(outgoing, self._choice, deadline), future.settle).step()
        return future

    def send_oneway(
        self,
        topic: str,
        body: Body,
        *,
        tag: str | None = None,
        keys: str | Iterable[str] = (),
        properties: Mapping[str, str] = _NONE,
        ordering_key: str | None = None,
        delay_level: int = 0,
        delay: timedelta | None = None,
        deliver_at: datetime | None = None,
        priority: int | None = None,
        dedupe_id: str | None = None,
    ) -> None:
        """Write one message to a connection without waiting for an answer: the fastest way to send, but it may be lost.

        Args:
            topic: the topic; it need not exist if brokers create topics on first send.
            body: the body, or with a ``serializer`` the value; from 4 KiB on it is stored compressed, if that makes it shorter.
            tag: the tag by which consumers can filter.
            keys: keys by which the message can be found; several, or one text with blanks between them.
            properties: further names and values.
            ordering_key: messages with the same key go to the same partition, one after the other.
            delay_level: 1 to 18 for 1 s, 5 s, 10 s, 30 s, 1 to 10 min, 20 min, 30 min, 1 h, 2 h; 0 for none.
            delay: the time after which it is delivered.
            deliver_at: instead of ``delay``, the time at which it is delivered; with a time zone.
            priority: 0 and more, the greater the more urgent, in a topic with priorities.
            dedupe_id: an id under which a topic with a window stores only one message.

        Raises:
            RouteNotFound: there is nowhere to send it; ``reason`` says why.
            ConnectionFailed: the broker cannot be reached.
            BadRequest: an argument is invalid.
        """
        deadline = self._core.deadline()
        data: Any = body
        if self._serializer is not None:
            data, properties = serialized(self._serializer, body, properties)
        own = _own(delay_level, delay, deliver_at, priority)
        once = NOT_ONCE if dedupe_id is None else Once(dedupe_id)
        pairs = self._properties(topic, data, tag, keys, properties, own, ordering_key, once)
        if self._gatherer is not None:
            self._gatherer.flush(topic)
        sent = intercepting.sending(self._core.id, self.group, topic, (pairs,))
        try:
            outgoing = compose(self.group, topic, data, pairs, ordering_key=ordering_key, once=once)
            tell(self._core.transport, self._choice, outgoing, deadline)
        except BaseException as error:
            sent(error)
            raise
        sent([])

    def send_batch(
        self, topic: str, messages: Iterable[Body | OutgoingMessage[Body]], *, timeout_s: float | None = None
    ) -> list[SendResult]:
        """Send messages to one partition in one request, and return one result for each. All are stored, or none.

        A batch has at most 1,024 messages and 4 MiB; bodies are not compressed. Messages of a batch cannot be delayed,
        and in a topic with priorities they have the same one.

        Args:
            topic: the topic; it need not exist if brokers create topics on first send.
            messages: bodies, or messages with a tag, keys, properties and a priority.
            timeout_s: the time limit of the whole call; by default the client's.

        Raises:
            RouteNotFound: there is nowhere to send it; ``reason`` says why.
            SendFailed: every try failed, each for a reason of its own.
            BrokerBusy: the brokers are overloaded; ``retry_after_s`` says when to try again.
            Refused: a broker does not take it, and others would not either.
            RequestTimeout: no answer in time; it may be stored.
            BadRequest: an argument is invalid.
        """
        deadline = self._core.deadline(timeout_s)
        batch: Iterable[Any] = messages
        if self._serializer is not None:
            batch = [outgoing_of(self._serializer, message) for message in several(messages)]
        pairs: Sequence[dict[str, str]] = ()
        if intercepting.is_intercepted():
            batch, pairs = with_own_properties(batch)

        sent = intercepting.sending(self._core.id, self.group, topic, pairs)
        try:
            outgoing = compose_batch(self.group, topic, batch, self._core.unique_ids)
            results = [] if outgoing is None else self._send(outgoing, deadline, sent)
        except BaseException as error:
            sent(error)
            raise
        sent(results)
        return results

    def send_packed(self, topic: str, packed: bytes, count: int, *, queue: MessageQueue | None = None) -> list[SendResult]:
        """Send messages that are already encoded as in ``metaq.protocol.remoting.sending.batch``; they get no client ids.

        Args:
            topic: the name of the topic.
            packed: the messages.
            count: how many they are.
            queue: one of ``queues``; by default any.

        Returns:
            One result for each message, in order.

        Raises:
            RouteNotFound: there is nowhere to send it; ``reason`` says why.
            SendFailed: every try failed, each for a reason of its own.
            BrokerBusy: the brokers are overloaded; ``retry_after_s`` says when to try again.
            Refused: a broker does not take it, and others would not either.
            RequestTimeout: no answer in time; it may be stored.
            BadRequest: an argument is invalid.
        """
        deadline = self._core.deadline()
        checks.topic(topic)
        check_size(packed, f"a batch of {count} messages")
        outgoing = outgoing_batch(self.group, topic, packed, [""] * count)._replace(queue=queue)
        return self._send(outgoing, deadline)

    def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """Return the sorted queues to which messages of a topic can be sent now.

        If the topic does not exist yet, they are those that it would have.

        Args:
            topic: the name of the topic.

        Raises:
            RouteNotFound: there is nowhere to send it; ``reason`` says why.
            BadRequest: an argument is invalid.
        """
        checks.topic(topic)
        return self._core.routes.writable(topic, self._core.deadline())

    def request(
        self,
        topic: str,
        body: Body,
        *,
        tag: str | None = None,
        keys: str | Iterable[str] = (),
        properties: Mapping[str, str] = _NONE,
        timeout_s: float | None = None,
    ) -> ReceivedMessage:
        """Send a message to the topic, and wait for the reply of a consumer (``Producer.reply``).

        Args:
            topic: the topic; it need not exist if brokers create topics on first send.
            body: the body, or with a ``serializer`` the value; from 4 KiB on it is stored compressed, if that makes it shorter.
            tag: the tag by which consumers can filter.
            keys: keys by which the message can be found; several, or one text with blanks between them.
            properties: further names and values.
            timeout_s: the time limit until the reply is here; by default the client's.

        Returns:
            The reply.

        Raises:
            RouteNotFound: there is nowhere to send it; ``reason`` says why.
            SendFailed: every try failed, each for a reason of its own.
            BrokerBusy: the brokers are overloaded; ``retry_after_s`` says when to try again.
            Refused: a broker does not take it, and others would not either.
            RequestTimeout: no reply in time.
            BadRequest: an argument is invalid.
        """
        deadline = self._core.deadline(timeout_s)
        with self._replies.expect() as expected:
            self._core.routes.writable(topic, deadline)
            self._replies.ensure_known(deadline)
            lifetime_ms = max(1, round((deadline - time.monotonic()) * 1000))
            data: Any = body
            if self._serializer is not None:
                data, properties = serialized(self._serializer, body, properties)
            checks.properties(properties)
            own = {CORRELATION_ID: expected.correlation, REPLY_TO: self._core.id, TTL: str(lifetime_ms)}
            pairs = self._properties(topic, data, tag, keys, {**properties, **own})
            self._send_one(topic, data, pairs, deadline)
            reply = expected.wait(deadline, topic)
            return reply if self._serializer is None else decoded(reply, self._serializer.loads)

    def reply(
        self,
        request: ReceivedMessage,
        body: Body,
        *,
        properties: Mapping[str, str] = _NONE,
        timeout_s: float | None = None,
    ) -> SendResult:
        """Reply to a message whose sender waits for it (``ReceivedMessage.is_request``).

        Args:
            request: a message whose ``is_request`` is true.
            body: the body of the reply.
            properties: further names and values.
            timeout_s: the time limit of the whole call; by default the client's.

        Returns:
            The place and the status of the reply, which the broker stores, too.

        Raises:
            RouteNotFound: there is nowhere to send it; ``reason`` says why.
            SendFailed: every try failed, each for a reason of its own.
            BrokerBusy: the brokers are overloaded; ``retry_after_s`` says when to try again.
            Refused: a broker does not take it, and others would not either.
            RequestTimeout: no answer in time; it may be stored.
            BadRequest: nobody waits for a reply to the message, or an argument is invalid.
        """
        if not isinstance(request, ReceivedMessage):
            raise checks.wrong("request", request, "a message that was received")
        given = request.properties
        if not request.is_request or not given.get(CLUSTER):
            raise BadRequest(f"nobody waits for a reply to {request!r}: {CORRELATION_ID}, {REPLY_TO} or {CLUSTER} is missing")
        own = {name: given[name] for name in (CORRELATION_ID, REPLY_TO, TTL) if name in given}
        data: Any = body
        if self._serializer is not None:
            data, properties = serialized(self._serializer, body, properties)
        checks.properties(properties)
        topic = f"{given[CLUSTER]}_REPLY_TOPIC"
        pairs = self._properties(topic, data, None, (), {**properties, **own, MESSAGE_TYPE: "reply"})
        return self._send_one(topic, data, pairs, self._core.deadline(timeout_s), code=Request.SEND_REPLY_MESSAGE_V2)

    def _properties(
        self,
        topic: str,
        body: bytes,
        tag: str | None,
        keys: str | Iterable[str],
        properties: Mapping[str, str],
        own: Mapping[str, str] = _NONE,
        ordering_key: str | None = None,
        once: Once = NOT_ONCE,
    ) -> dict[str, str]:
        """Check a message, and return its properties, with a new id."""
        checks.topic(topic)
        checks.message(body, tag, properties)
        pairs = message_properties(self._core.unique_ids.next(), tag, checks.keys(keys), properties, own)
        if ordering_key is not None:
            checks.ordering_key(ordering_key)
        if ordering_key:
            pairs[SHARDING_KEY] = ordering_key
        if once.ident is not None:
            checks.dedupe_id(once.ident)
            pairs[DEDUPE_ID] = once.ident
        return pairs

    def _send_one(
        self,
        topic: str,
        body: bytes,
        pairs: dict[str, str],
        deadline: float,
        ordering_key: str | None = None,
        once: Once = NOT_ONCE,
        code: Request = Request.SEND_MESSAGE_V2,
    ) -> SendResult:
        sent = intercepting.sending(self._core.id, self.group, topic, (pairs,))
        try:
            outgoing = compose(self.group, topic, body, pairs, code=code, ordering_key=ordering_key, once=once)
            results = self._send(outgoing, deadline, sent)
        except BaseException as error:
            sent(error)
            raise
        sent(results)
        return results[0]

    def _send(self, outgoing: Outgoing, deadline: float, sent: Sent | None = None) -> list[SendResult]:
        if self._gatherer is not None:
            self._gatherer.flush(outgoing.topic)
        return deliver(self._core.transport, self._choice, outgoing, deadline, sent if intercepting.is_intercepted() else None)


def _own(level: int, delay: timedelta | None, deliver_at: datetime | None, priority: int | None) -> Mapping[str, str]:
    """Return the properties of these parameters."""
    checks.delay(level, delay, deliver_at)
    checks.priority(priority)
    return {**delay_properties(level, delay, deliver_at), **priority_properties(priority)}
