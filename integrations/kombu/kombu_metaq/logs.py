"""Reading what is sent to exchanges, for temporary queues: from where the exchange is when they are bound."""

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kombu_metaq.delivery import Raw, read
from metaq.errors import ClientClosed
from metaq.protocol.subscription import EVERYTHING

if TYPE_CHECKING:
    from metaq.client import Client, PullConsumer

logger = logging.getLogger(__name__)

POLL_S: Final = 1.0
"""How long a thread waits before it looks whether its connection was closed."""


class LogReader:
    """Reads the topic of an exchange, from its end on, in a thread of its own."""

    def __init__(self, client: "Client", topic: str, tag: str, deliver: Callable[[Raw], None]) -> None:
        """Begin with all messages, or those that have a tag.

        When this returns, whatever is sent from now on will be delivered. ``deliver`` is called on the thread.
        """
        self._topic = topic
        self._deliver = deliver
        self._closed = threading.Event()
        self._consumer: PullConsumer = client.pull_consumer(
            topic, topic, tags=tag or EVERYTHING
        )  # a group of the name: users need rights to it
        for queue in self._consumer.partitions():
            self._consumer.read_from(queue, self._consumer.end_offset(queue))
        threading.Thread(target=self._read, name=f"metaq-{topic}", daemon=True).start()

    def _read(self) -> None:
        while not self._closed.is_set():
            try:
                messages = self._consumer.poll(POLL_S)
            except ClientClosed:
                return
            for message in messages:
                try:
                    self._deliver(read(message.body))
                except Exception as error:  # noqa: BLE001 - whatever it is, replies and remote control must go on
                    logger.warning("message dropped topic=%s message=%s reason=%r", self._topic, message.id, error)

    def close(self) -> None:
        """Read no more."""
        self._closed.set()
        self._consumer.close()
