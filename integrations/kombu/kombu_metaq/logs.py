"""Reading what is sent to exchanges, for temporary queues: from where the exchange is when they are bound."""

import logging
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from kombu_metaq.delivery import Raw, read
from metaq.errors import ClientClosed, ClientError
from metaq.protocol.subscription import EVERYTHING

if TYPE_CHECKING:
    from metaq.client import Client, PullConsumer

logger = logging.getLogger(__name__)

POLL_S: Final = 1.0
"""How long a thread waits before it looks whether its connection was closed."""
FOLLOW_S: Final = 2.0
"""How often it looks whether there are more partitions."""


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
        self._bound_at = datetime.now(UTC)
        for queue in self._consumer.partitions():
            self._consumer.read_from(queue, self._consumer.end_offset(queue))
        threading.Thread(target=self._read, name=f"metaq-{topic}", daemon=True).start()

    def _read(self) -> None:
        follow_s = time.monotonic() + FOLLOW_S
        while not self._closed.is_set():
            try:
                if time.monotonic() >= follow_s:
                    self._follow()
                    follow_s = time.monotonic() + FOLLOW_S
                messages = self._consumer.poll(POLL_S)
            except ClientClosed:
                break
            for message in messages:
                try:
                    self._deliver(read(message.body))
                except Exception as error:  # noqa: BLE001 - whatever it is, replies and remote control must go on
                    logger.warning("message dropped topic=%s message=%s reason=%r", self._topic, message.id, error)
        self._consumer.close()  # again, as ``_follow`` may have added a partition meanwhile

    def _follow(self) -> None:
        """Read partitions, too, that have appeared since the exchange was bound: what was stored there since then."""
        try:
            for queue in set(self._consumer.partitions()) - set(self._consumer.assignment()):
                self._consumer.read_from(queue, self._consumer.offset_at(queue, self._bound_at))
        except ClientClosed:
            raise
        except ClientError as error:
            logger.debug("more partitions not read yet topic=%s reason=%s", self._topic, error)

    def close(self) -> None:
        """Read no more."""
        self._closed.set()
        self._consumer.close()
