"""The topics and groups in which queues are kept: named, made, measured and emptied."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import metaq


class Topics:
    """A queue is a topic with one group, which has its name and leases its messages. Threads may share it."""

    def __init__(self, client: metaq.Client, namespace: str, max_priority: int | None) -> None:
        self._admin = client.admin()
        self._namespace = namespace
        self._max_priority = max_priority
        self._made: set[str] = set()

    def name(self, queue: str) -> str:
        """Return the name of a queue's topic and group. Dots, which only queues may have, become ``%2E``."""
        return f"{self._namespace}-{queue}".replace(".", "%2E")

    def ensure(self, queue: str) -> str:
        """Return the name of a queue's topic, which is made unless it exists. One that exists stays as it is.

        A group shares the messages of one partition among any number of workers, so a topic has one: then the messages of a
        broker come in the order in which they were sent. With priorities it has one for each.

        Raises:
            metaq.ClientError: no broker can be asked, or it refuses.
        """
        topic = self.name(queue)
        if topic in self._made:
            return topic
        try:
            self._admin.route(topic)
        except metaq.RouteNotFound as error:
            if error.reason is not metaq.RouteProblem.TOPIC_ABSENT:
                raise
            if self._max_priority is None:
                self._admin.create_topic(topic, 1)
            else:
                self._admin.create_topic(topic, self._max_priority + 1, priority=True)
        self._made.add(topic)
        return topic

    def is_done(self, queue: str) -> bool:
        """Return whether all messages of a queue have been processed, also those that are delayed.

        Raises:
            metaq.ClientError: no broker can be asked, or it refuses.
        """
        topic = self.ensure(queue)
        before = self._admin.group_lag(topic, topic)
        if any(view.lag for view in before) or next(self._delayed(topic), None) is not None:
            return False
        # A message that was delivered since then was seen in neither of the two; the end of its partition has moved.
        after = self._admin.group_lag(topic, topic)
        return [(view.queue, view.end, view.lag) for view in after] == [(view.queue, view.end, 0) for view in before]

    def flush(self, queue: str) -> None:
        """Drop all messages of a queue, also those that are delayed and those that workers have. Dead letters stay.

        Raises:
            metaq.ClientError: no broker can be asked, or it refuses.
        """
        topic = self.ensure(queue)
        for cancel in list(self._delayed(topic)):
            with suppress(metaq.TooLate):  # what was delivered meanwhile is dropped below
                cancel()
        self._admin.reset_offset(topic, topic, metaq.ConsumeFrom.LAST, apply=True)

    def _delayed(self, topic: str) -> Iterator[Callable[[], None]]:
        """Yield for each delayed message of a topic what cancels it."""
        timers = self._admin.timers()
        for broker in self._admin.masters():
            for timer in timers.pending(broker.address):
                if timer.topic == topic and timer.handle is not None:  # runs of recurring messages have none
                    yield partial(timers.cancel, broker.name, timer)
