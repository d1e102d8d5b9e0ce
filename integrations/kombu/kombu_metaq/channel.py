"""A channel: queues and exchanges of AMQP on topics, and what is published and consumed there."""

import logging
from datetime import UTC, datetime
from functools import partial
from queue import Empty
from typing import TYPE_CHECKING, Any, Final

from kombu.entity import TRANSIENT_DELIVERY_MODE
from kombu.exceptions import ChannelError
from kombu.transport import virtual
from kombu.transport.base import to_rabbitmq_queue_arguments
from kombu.utils.json import dumps
from kombu.utils.uuid import uuid

from kombu_metaq.delivery import ONCE, Delivery, LogDelivery, Raw
from kombu_metaq.names import exchange_topic, queue_topic, tag_of
from kombu_metaq.qos import QoS
from kombu_metaq.shared import Shared
from kombu_metaq.terms import QueueTerms, SendTerms, due_of, terms_of
from metaq.errors import ConnectionFailed

if TYPE_CHECKING:
    from kombu_metaq.broker import Broker

logger = logging.getLogger(__name__)

DEFAULT_EXCHANGE: Final = ""
GET_S: Final = 1.0
"""How long the broker is asked by ``basic_get``."""
_UNDECLARED: Final = terms_of(durable=True, exclusive=False, auto_delete=False, arguments=None)


class Channel(virtual.Channel):  # type: ignore[misc]
    """A channel on topics.

    A queue is a topic with one group that leases. A temporary queue is no topic: it reads what is sent to its exchanges, which
    have topics for that. What is sent to an exchange goes to the topics of those queues which this process has bound to it,
    and to the topic of the exchange for temporary ones of all processes.
    """

    QoS = QoS
    supports_fanout = True
    max_priority = 1023

    def __init__(self, connection: Any, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self._without_ack: set[str] = set()
        """The queues that are consumed without acks."""

    @property
    def _broker(self) -> "Broker":
        broker: Broker = self.connection.broker
        return broker

    @property
    def _shared(self) -> Shared:
        shared: Shared = self.connection.shared
        return shared

    @property
    def _terms(self) -> dict[str, QueueTerms]:
        """The queues that this process has declared."""
        return self._shared.terms

    def _topic(self, queue: str) -> str:
        return queue_topic(self.connection.virtual_host, queue)

    def _log(self, exchange: str) -> str:
        return exchange_topic(self.connection.virtual_host, exchange)

    def _is_temporary(self, queue: str) -> bool:
        return self._terms.get(queue, _UNDECLARED).is_temporary

    def prepare_queue_arguments(self, arguments: dict[str, Any], **options: Any) -> dict[str, Any]:
        """Return the arguments of a queue with its options, by the names that RabbitMQ has for them."""
        prepared: dict[str, Any] = to_rabbitmq_queue_arguments(arguments, **options)
        return prepared

    # -- queues and exchanges -----------------------------------------------------------------------------------------

    def _new_queue(
        self,
        queue: str,
        *,
        durable: bool = False,
        exclusive: bool = False,
        auto_delete: bool = False,
        arguments: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        terms = terms_of(durable=durable, exclusive=exclusive, auto_delete=auto_delete, arguments=arguments)
        self._terms.setdefault(queue, terms)
        if terms.is_temporary:
            self._make(queue)
            if durable:  # such are the queues for results, which are sent to their names before they are consumed
                self._listen(DEFAULT_EXCHANGE, queue, queue)
        elif not auto_delete:  # one with that is made with its first binding, message or consumer: it may become temporary
            self._make(queue)

    def _make(self, queue: str) -> None:
        """See that a queue has what it needs to get messages; ``ChannelError`` when nobody has declared it."""
        if queue not in self._terms and not self._has_queue(queue):
            host = self.connection.virtual_host
            raise ChannelError(f"NOT_FOUND - no queue {queue!r} in vhost {host!r}", (50, 10), "Channel.queue_declare", "404")
        terms = self._terms.get(queue, _UNDECLARED)
        if terms.is_temporary:
            self._shared.use(queue, terms)
        else:
            self._broker.make_queue(self._topic(queue), terms)

    def _has_queue(self, queue: str, **_: Any) -> bool:
        return self._is_temporary(queue) or self._broker.has_topic(self._topic(queue))

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str | None, queue: str) -> None:
        terms = self._terms.get(queue, _UNDECLARED)
        if terms.auto_delete and self.typeof(exchange).type == "fanout":  # kombu's Broadcast: each consumer has one of its own
            self._terms[queue] = terms._replace(is_temporary=True)
        self._make(queue)
        if self._is_temporary(queue):
            self._listen(exchange, routing_key, queue)

    def _listen(self, exchange: str, routing_key: str, queue: str) -> None:
        """Begin to read what is sent to an exchange: only one routing key, where no other one can match."""
        topic, tag = self._place(exchange, routing_key)
        self._broker.make_log(topic)
        is_default = exchange == DEFAULT_EXCHANGE
        deliver = partial(self._shared.put, queue) if is_default else partial(self._shared.route, exchange)
        self._shared.read(queue, topic, tag, deliver)

    def _place(self, exchange: str, routing_key: str) -> tuple[str, str]:
        """Return the topic of an exchange, and the tag of what a binding matches, if that is one routing key."""
        is_direct = exchange == DEFAULT_EXCHANGE or self.typeof(exchange).type == "direct"
        return self._log(exchange), tag_of(routing_key) if is_direct else ""

    def _size(self, queue: str) -> int:
        if self._is_temporary(queue):
            return len(self._shared.temporary(queue).waiting)
        topic = self._topic(queue)
        return self._broker.size(topic) if self._broker.has_topic(topic) else 0

    def _purge(self, queue: str) -> int:
        if self._is_temporary(queue):
            waiting = self._shared.temporary(queue).waiting
            count = len(waiting)
            waiting.clear()
            return count
        topic = self._topic(queue)
        return self._broker.purge(topic) if self._broker.has_topic(topic) else 0

    def _is_used(self, queue: str) -> bool:
        if self._is_temporary(queue):
            return self._shared.temporary(queue).bell is not None
        return queue in self.connection._callbacks or self._broker.is_used(self._topic(queue))

    def _is_empty(self, queue: str) -> bool:
        if self._is_temporary(queue):
            return not self._shared.temporary(queue).waiting
        topic = self._topic(queue)
        return not self._broker.has_topic(topic) or self._broker.is_empty(topic)

    def queue_delete(self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any) -> None:
        """Delete a queue: its topic with all messages, its group, and its bindings in this process.

        With ``if_unused`` nothing happens while it is consumed, with ``if_empty`` while it has a message, also a delayed one or
        one that runs.
        """
        if (if_unused and self._is_used(queue)) or (if_empty and not self._is_empty(queue)):
            return
        if self._is_temporary(queue):
            self._shared.end(queue)
            return
        for exchange, routing_key, arguments in list(self.state.queue_bindings(queue)):
            self.queue_unbind(queue, exchange, routing_key, arguments)
        self.state.queue_bindings_delete(queue)
        self._terms.pop(queue, None)
        if self._broker.has_topic(self._topic(queue)):
            self._broker.delete_queue(self._topic(queue))

    def exchange_delete(self, exchange: str, if_unused: bool = False, nowait: bool = False) -> None:
        """Delete an exchange and its bindings in this process, with ``if_unused`` unless it has some. Its queues stay."""
        bindings = [binding for binding in list(self.state.bindings) if binding.exchange == exchange]
        if if_unused and bindings:
            return
        for binding in bindings:
            self.state.binding_delete(*binding)
        self.state.exchanges.pop(exchange, None)

    # -- sending ------------------------------------------------------------------------------------------------------

    def basic_publish(self, message: Raw, exchange: str, routing_key: str, **kwargs: Any) -> None:
        """Publish a message, and return when all that it goes to has stored it; of transient ones when it is written."""
        if self.connection is None:  # kombu has connected again to declare a queue, and tries again with a new channel
            raise ConnectionFailed("this channel was closed with its connection")
        self._inplace_augment_message(message, exchange, routing_key)
        # kombu repeats a publish that has failed with the same properties
        once = message["properties"].setdefault(ONCE, uuid())
        body = dumps(message).encode()
        terms = SendTerms(
            priority=self._get_message_priority(message) or None,
            due=due_of(message["headers"], datetime.now(UTC)),
            once=once,
            is_transient=message["properties"].get("delivery_mode") == TRANSIENT_DELIVERY_MODE,
        )
        for topic, tag in self._destinations(exchange, routing_key):
            self._broker.send(topic, tag, body, terms)

    def _next_delivery_tag(self) -> str:
        """Return nothing: a message is numbered by the channel that gets it."""
        return ""

    def _destinations(self, exchange: str, routing_key: str) -> list[tuple[str, str | None]]:
        """Return the topics that a message goes to, each with the tag that it has there."""
        if exchange == DEFAULT_EXCHANGE:
            topic = self._topic(routing_key)
            if not self._is_temporary(routing_key):
                if routing_key in self._terms:
                    self._make(routing_key)
                if self._broker.has_topic(topic):
                    return [(topic, None)]
            return [self._log_place(exchange, routing_key)]
        queues = [queue for queue in self._lookup(exchange, routing_key) if not self._is_temporary(queue)]
        found: list[tuple[str, str | None]] = [(self._topic(queue), None) for queue in queues]
        declared = self.state.exchanges.get(exchange, {"type": "direct", "durable": False})
        if declared["type"] == "direct" and declared["durable"]:
            if queues:
                return found
            logger.warning(
                "this process has declared no queue for it, so only temporary ones get it exchange=%s routing_key=%s",
                exchange,
                routing_key,
            )
        return [*found, self._log_place(exchange, routing_key)]

    def _log_place(self, exchange: str, routing_key: str) -> tuple[str, str]:
        """Return the topic of an exchange, which is there then, and the tag that a message has in it."""
        topic = self._log(exchange)
        self._broker.make_log(topic)
        return topic, tag_of(routing_key)

    # -- consuming ----------------------------------------------------------------------------------------------------

    def basic_consume(self, queue: str, no_ack: bool, callback: Any, consumer_tag: str, **kwargs: Any) -> None:
        """Have the messages of a queue given to ``callback`` by ``drain_events``, no more unsettled ones than prefetched."""
        self._make(queue)
        if self._is_temporary(queue):
            # its bindings again, as kombu counts those as made for which no broker could be asked; without any, its name
            for exchange, routing_key, _ in list(self.state.queue_bindings(queue)) or [(DEFAULT_EXCHANGE, queue, None)]:
                self._listen(exchange, routing_key, queue)
            self._shared.temporary(queue).bell = self.connection.bell
        else:
            self._broker.begin_leases(self._topic(queue))
        if no_ack:
            self._without_ack.add(queue)
        super().basic_consume(queue, no_ack, callback, consumer_tag, **kwargs)
        self.connection.bell.ring()

    def basic_cancel(self, consumer_tag: str) -> None:
        """Ask for no more messages; those that were delivered stay leased until they are settled. A temporary queue ends."""
        queue = self._tag_to_queue.get(consumer_tag)
        super().basic_cancel(consumer_tag)
        if queue is None or queue in self._active_queues:
            return
        self._without_ack.discard(queue)
        if self._is_temporary(queue):
            self.queue_delete(queue)
        elif (reader := self._broker.leases(self._topic(queue))) is not None:
            reader.want(0)

    def basic_qos(self, prefetch_size: int = 0, prefetch_count: int = 0, apply_global: bool = False) -> None:
        """Set how many unsettled messages this channel may have."""
        super().basic_qos(prefetch_size, prefetch_count, apply_global)
        self.on_settled()

    def on_settled(self) -> None:
        """Have more messages asked for, as there may be room."""
        if self.connection is not None:
            self.connection.bell.ring()

    def drain_events(self, timeout: float | None = None, callback: Any = None) -> Any:
        """Give one message that is here to its consumer; ``Empty`` when there is none, or no room for it."""
        free = self.qos.free()
        for queue in self._active_queues:
            if (reader := self._broker.leases(self._topic(queue))) is not None:
                reader.want(free)
        return super().drain_events(timeout=timeout, callback=callback)

    def _get(self, queue: str, timeout: float | None = None) -> Raw:
        delivery = self._next(queue)
        if delivery is None:
            raise Empty
        if queue in self._without_ack:
            delivery.ack()
            return self._tagged(delivery)
        return self._held(delivery)

    def _next(self, queue: str) -> Delivery | None:
        if self._is_temporary(queue):
            waiting = self._shared.temporary(queue).waiting
            return LogDelivery(waiting, waiting.popleft()) if waiting else None
        reader = self._broker.leases(self._topic(queue))
        return None if reader is None else reader.take()

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        """Return a message of a queue; ``None`` when none comes within a second, ``ChannelError`` when there is no queue."""
        self._make(queue)
        delivery = self._next(queue)
        if delivery is None and not self._is_temporary(queue):
            reader = self._broker.begin_leases(self._topic(queue))
            reader.want(1)
            delivery = reader.wait(GET_S)
            reader.want(0)
        if delivery is None:
            return None
        if no_ack:
            delivery.ack()
            return self.Message(self._tagged(delivery), channel=self)
        return self.Message(self._held(delivery), channel=self)

    def _tagged(self, delivery: Delivery) -> Raw:
        delivery.raw["properties"]["delivery_tag"] = str(next(self._delivery_tags))
        return delivery.raw

    def _held(self, delivery: Delivery) -> Raw:
        raw = self._tagged(delivery)
        self.qos.hold(raw["properties"]["delivery_tag"], delivery)
        return raw
