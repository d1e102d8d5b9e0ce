"""Gets that are held because there is no message yet (long polling): woken by a new message, or by their own timer."""

from collections.abc import Callable, Iterable
from typing import Any

from metaq.message import INTERNAL_TOPICS, TopicPartition
from metaq.store.queues.consumequeue import ConsumeQueue


class Hold:
    """One held get."""

    __slots__ = ("_again", "_holds", "_key", "_timer")

    def __init__(self, holds: "Holds", key: TopicPartition, timer: Any, again: Callable[[], None]) -> None:
        self._holds = holds
        self._key = key
        self._again = again
        self._timer = timer
        timer.start(self.wake)

    def cancel(self) -> None:
        """Forget the get without an answer, for example because the client is gone."""
        self._timer.close()
        self._holds.forget(self._key, self)

    def wake(self) -> None:
        """End the hold: look once more and answer with whatever is found."""
        self.cancel()
        self._again()


class Holds:
    """All held gets by partition; a partition need not exist yet."""

    def __init__(self) -> None:
        self._held: dict[TopicPartition, set[Hold]] = {}
        self.count = 0
        self.of_clients = 0
        """Holds of clients only: the broker itself waits for delayed messages in the same way."""
        self.stopping = False
        """True when no more gets of clients are held, because the broker stops or changes its role."""

    def has_room(self, most: int) -> bool:
        """Return whether a client's get may be held, when at most ``most`` are held at once."""
        return not self.stopping and self.count < most

    def stop(self) -> None:
        """Hold no more gets of clients, because the broker stops; those that are held stay until ``wake_all``."""
        self.stopping = True

    def hold(self, key: TopicPartition, timer: Any, again: Callable[[], None]) -> Hold:
        """Hold a get until its partition has something new or the timer ends, then call ``again``; return the hold."""
        hold = Hold(self, key, timer, again)
        self._held.setdefault(key, set()).add(hold)
        self.count += 1
        self.of_clients += key.topic not in INTERNAL_TOPICS
        return hold

    def forget(self, key: TopicPartition, hold: Hold) -> None:
        held = self._held.get(key)
        if held is not None and hold in held:
            held.remove(hold)
            self.count -= 1
            self.of_clients -= key.topic not in INTERNAL_TOPICS
            if not held:
                del self._held[key]

    def wake(self, queues: Iterable[ConsumeQueue]) -> None:
        """Wake the gets of queues in which readers can see more."""
        if self._held:
            for queue in queues:
                for hold in list(self._held.get(TopicPartition(queue.topic, queue.partition), ())):
                    hold.wake()

    def wake_all(self) -> None:
        """Answer all held gets, because the broker stops."""
        for held in list(self._held.values()):
            for hold in list(held):
                hold.wake()
