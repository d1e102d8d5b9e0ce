"""The leases of a queue: how many are wanted, and what becomes of each."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial

from kombu_metaq.delivery import Raw, read
from metaq.client import LeaseConsumer
from metaq.client.connecting.transport import may_pass
from metaq.client.leasing.holder import LeaseHolder
from metaq.client.leasing.lease import Lease
from metaq.errors import ClientError

logger = logging.getLogger(__name__)


class LeaseReader:
    """The leases of one queue. No more messages are asked for than ``want`` says; each is extended until it is settled.

    It works with the part of the client that ``metaq.LeaseConsumer`` and ``metaq.aio`` are made of, as nothing here may block.
    """

    def __init__(self, consumer: LeaseConsumer, ring: Callable[[], None]) -> None:
        self._holder: LeaseHolder = consumer._holder
        self._holder.begin_handlers(None)
        self._ring = ring
        self._credits: list[AbstractContextManager[None]] = []
        self._holder.on_change = self._changed

    def _changed(self) -> None:
        """Wake the connection; or give back what a broker had begun to send before nothing was wanted any more."""
        if self._credits:
            self._ring()
        else:
            self._give_back_all()

    def want(self, count: int) -> None:
        """Have brokers asked for at most so many messages. With 0 those that are here go to other workers."""
        while len(self._credits) < count:
            credit = self._holder.waiting(float("inf"))
            credit.__enter__()
            self._credits.append(credit)
        while len(self._credits) > count:
            self._credits.pop().__exit__(None, None, None)
            if not self._credits:
                self._give_back_all()

    def take(self) -> "LeasedDelivery | None":
        """Return the next message that is here; without one, have brokers asked for what is wanted."""
        while (lease := self._holder.take(is_handled=True)) is not None:
            delivery = self._readable(lease)
            if delivery is not None:
                return delivery
        return None

    def _give_back_all(self) -> None:
        while (lease := self._holder.take(is_handled=True)) is not None:
            self.give_back(lease)

    def wait(self, timeout_s: float) -> "LeasedDelivery | None":
        """Return the next message that comes within so many seconds, if any."""
        until_s = time.monotonic() + timeout_s
        while (lease := self._holder.next(until_s, is_handled=True)) is not None:
            delivery = self._readable(lease)
            if delivery is not None:
                return delivery
        return None

    def _readable(self, lease: Lease) -> "LeasedDelivery | None":
        """Return the delivery of a lease. What is no message of kombu becomes a dead letter, as it would fail each time."""
        try:
            raw = read(lease.message.body) if lease.message.error is None else None
        except ValueError:
            raw = None
        if raw is None:
            logger.error("not a message of kombu, now a dead letter group=%s message=%s", self._holder.group, lease.message.id)
            self.settle(lease, self._holder.reject)
            return None
        raw["properties"]["delivery_info"]["redelivered"] = lease.attempt > 1
        return LeasedDelivery(self, lease, raw)

    def ack(self, lease: Lease) -> None:
        """Finish a message. While its broker cannot be reached, there are tries until the lease ends."""
        self.settle(lease, self._holder.ack)

    def give_back(self, lease: Lease) -> None:
        """Let a message come again at once."""
        self.settle(lease, partial(self._holder.nack, delay_s=0.0))

    def reject(self, lease: Lease) -> None:
        """Make a message a dead letter of the queue's group."""
        self.settle(lease, self._holder.reject)

    def settle(self, lease: Lease, tell: Callable[[Lease], Future[None]]) -> None:
        """Tell the broker what becomes of a message."""
        tell(lease).add_done_callback(partial(self._told, lease, is_ack=tell == self._holder.ack))

    def _told(self, lease: Lease, told: Future[None], *, is_ack: bool) -> None:
        """Look at the answer. Acks are repeated; what else is not told happens later, when the lease ends."""
        error = told.exception()
        passes = isinstance(error, ClientError) and may_pass(error)
        if is_ack and passes and not self._holder.closed and lease.is_usable(time.monotonic()):
            self.ack(lease)
            return
        if error is not None:
            logger.warning("message not settled, it may come again message=%s reason=%s", lease.message.id, error)
        self._holder.handled(lease)  # told already: only its extension ends
        self._ring()

    def close(self) -> None:
        """Leave the group; what was not taken is given back."""
        self.want(0)
        self._holder.close()


class LeasedDelivery:
    """A message of a queue with a topic."""

    def __init__(self, reader: LeaseReader, lease: Lease, raw: Raw) -> None:
        self._reader = reader
        self._lease = lease
        self.raw = raw

    def ack(self) -> None:
        """Finish it: the broker is told in the background."""
        self._reader.ack(self._lease)

    def give_back(self) -> None:
        """Let it come again, to any consumer of the queue."""
        self._reader.give_back(self._lease)

    def reject(self) -> None:
        """Make it a dead letter of the queue's group."""
        self._reader.reject(self._lease)
