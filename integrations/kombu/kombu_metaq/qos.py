"""Deliveries of a channel that are not settled yet: acks, rejects, and the prefetch count."""

import logging
from typing import Any, Final

from kombu.transport import virtual

from kombu_metaq.delivery import Delivery

logger = logging.getLogger(__name__)

MOST_UNSETTLED: Final = 1000
"""The messages that a channel without a prefetch count may have."""


class QoS(virtual.QoS):  # type: ignore[misc]
    """The deliveries of a channel by tag. Any thread may ack."""

    def __init__(self, channel: Any, prefetch_count: int = 0) -> None:
        super().__init__(channel, prefetch_count)
        self._open: dict[str, Delivery] = {}

    def hold(self, tag: str, delivery: Delivery) -> None:
        """Keep a delivery until it is settled."""
        self._open[tag] = delivery

    def free(self) -> int:
        """Return how many messages may be delivered now."""
        return max((self.prefetch_count or MOST_UNSETTLED) - len(self._open), 0)

    def can_consume(self) -> bool:
        """Return whether a message may be delivered now."""
        return self.free() > 0

    def can_consume_max_estimate(self) -> int:
        """Return how many messages may be delivered now."""
        return self.free()

    def append(self, message: Any, delivery_tag: str) -> None:
        """Do nothing: ``hold`` has the delivery already."""

    def get(self, delivery_tag: str) -> Delivery:
        """Return what was delivered under a tag."""
        return self._open[delivery_tag]

    def ack(self, delivery_tag: str) -> None:
        """Finish a message; one that was given back when the channel was closed comes again."""
        delivery = self._open.pop(delivery_tag, None)
        if delivery is not None:
            delivery.ack()
            self.channel.on_settled()

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Give a message back, or make it a dead letter."""
        delivery = self._open.pop(delivery_tag, None)
        if delivery is not None:
            (delivery.give_back if requeue else delivery.reject)()
            self.channel.on_settled()

    def restore_unacked(self) -> list[Any]:
        """Give back all that is not settled; return no errors, as what could not be given back comes again by itself."""
        while self._open:
            self._open.popitem()[1].give_back()
        return []

    def restore_unacked_once(self, stderr: Any = None) -> None:
        """Give back all that is not settled when the channel is closed."""
        self._on_collect.cancel()
        if self._open:
            logger.info("given back count=%d", len(self._open))
            self.restore_unacked()
