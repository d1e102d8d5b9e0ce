"""Consumers that wait for messages to lease, in line: those that have waited longest first.

One is woken when its group may have messages: readers see a new one, a lease ends, or a message was finished or given back. It
then looks, and takes its place in the line again if it finds nothing, or wants more.
"""

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import Any, Final

from metaq.engine.leases.leases import Leases
from metaq.engine.leases.popping import Pops
from metaq.message import INTERNAL_TOPICS
from metaq.store.queues.consumequeue import ConsumeQueue

SOONEST_S: Final = 0.001
Timer = Callable[[float], Any]
"""Makes a timer of the loop, not yet started, for a number of seconds."""


class Waiting:
    """One consumer that waits."""

    __slots__ = ("_again", "_line", "_over", "_timer", "client", "number", "partitions")

    def __init__(
        self,
        line: "_Line",
        number: int,
        partitions: Sequence[int] | None,
        again: Callable[[], None],
        timer: Any | None,
        client: object | None,
        over: Callable[[], None] | None,
    ) -> None:
        self._line: _Line | None = line
        self._again = again
        self._over = over or again
        self._timer = timer
        self.client = client
        """The connection that waits, if it may leave its group before its time is over."""
        self.number = number
        """Its place in the line."""
        self.partitions = partitions
        """The partitions that it wants; ``None``: all."""

    def __lt__(self, other: "Waiting") -> bool:
        return self.number < other.number

    @property
    def waits(self) -> bool:
        return self._line is not None

    def cancel(self) -> None:
        """Leave the line, for example because the client is gone."""
        line, self._line = self._line, None
        if line is not None:
            if self._timer is not None:
                self._timer.close()
            line.left(self)

    def wake(self) -> None:
        """Leave the line and look."""
        self.cancel()
        self._again()

    def expire(self) -> None:
        """Leave the line as at the end of its time."""
        self.cancel()
        self._over()


class _Line:
    """The consumers of one group that wait for messages of one topic."""

    def __init__(self, lines: "WaitingLines", group: str, topic: str) -> None:
        self._lines = lines
        self.group = group
        self.topic = topic
        self._heap: list[Waiting] = []
        self.count = 0
        self.timer: Any = None

    def add(self, one: Waiting) -> None:
        heappush(self._heap, one)
        self.count += 1

    def left(self, one: Waiting) -> None:
        self.count -= 1
        self._lines.left(self)
        heap = self._heap
        while heap and not heap[0].waits:
            heappop(heap)
        if len(heap) > 2 * self.count + 64:
            self._heap = sorted(each for each in heap if each.waits)

    def members(self) -> list[Waiting]:
        """Return who waits, in order."""
        return sorted(one for one in self._heap if one.waits)


class WaitingLines:
    """All lines of one broker."""

    def __init__(self, leases: Leases, pops: Pops, timer: Timer) -> None:
        self._leases = leases
        self._pops = pops
        self._timer = timer
        self._clock = leases.context.store.clock
        self._lines: dict[tuple[str, str], _Line] = {}
        self._groups: dict[str, set[str]] = {}  # by topic
        self._last = 0
        self.count = 0
        self.subscriptions = 0
        """Subscriptions of this broker: each waits whenever it does not read."""
        self.wakes = 0
        """Grows whenever somebody may be woken. A consumer that reads is not in line: if it has grown since, it may have missed
        a message."""
        self._stopping = False
        leases.touched = self.look

    def has_room(self) -> bool:
        """Return whether one more may wait (``max_held_gets``)."""
        return not self._stopping and self.count < self._leases.context.settings.max_held_gets

    def count_of(self, group: str, topic: str) -> int:
        """Return how many wait in one line."""
        line = self._lines.get((group, topic))
        return 0 if line is None else line.count

    def next_number(self) -> int:
        """Return the number of the last place in all lines."""
        self._last += 1
        return self._last

    def wait(
        self,
        group: str,
        topic: str,
        *,
        number: int,
        again: Callable[[], None],
        partitions: Sequence[int] | None = None,
        seconds: float | None = None,
        client: object | None = None,
        over: Callable[[], None] | None = None,
    ) -> Waiting:
        """Take the place ``number`` in a line.

        ``again`` is called, once, when there may be messages in one of the partitions (``None``: in any), or after some
        seconds; or ``over`` in its place when the client leaves the group.
        """
        line = self._lines.get((group, topic))
        if line is None:
            line = self._lines[group, topic] = _Line(self, group, topic)
            self._groups.setdefault(topic, set()).add(group)
        self.count += 1
        timer = None if seconds is None else self._timer(seconds)
        one = Waiting(line, number, partitions, again, timer, client, over)
        if timer is not None:
            timer.start(one.wake)
        line.add(one)
        self._set_timer(line)
        return one

    def leave(self, client: object, group: str) -> None:
        """Let a client that has left a group wait no longer."""
        for line in [line for line in self._lines.values() if line.group == group]:
            for one in line.members():
                if one.client is client and one.waits:
                    one.expire()

    def left(self, line: _Line) -> None:
        """Take note that somebody has left a line."""
        self.count -= 1
        if not line.count:
            if line.timer is not None:
                line.timer.close()
            del self._lines[line.group, line.topic]
            groups = self._groups[line.topic]
            groups.discard(line.group)
            if not groups:
                del self._groups[line.topic]

    # -- waking -------------------------------------------------------------------------------------------------------

    def wake(self, queues: Iterable[ConsumeQueue]) -> None:
        """Wake those who wait for messages of queues in which readers can see more."""
        self.wakes += 1
        if self._lines:
            for topic in {queue.topic for queue in queues}:
                if topic not in INTERNAL_TOPICS:
                    for group in list(self._groups.get(topic, ())):
                        self.look(group, topic)

    def look(self, group: str, topic: str) -> None:
        """Wake those in a line for whom there may be messages, one after the other, while there are some."""
        self.wakes += 1
        line = self._lines.get((group, topic))
        if line is None:
            return
        self._leases.settle(group, topic)  # also where nobody looks: a lease that has ended sets no timer again
        for one in line.members():
            if one.waits and self._pops.is_ready(group, topic, one.partitions):
                one.wake()
            elif one.partitions is None:
                break
        line = self._lines.get((group, topic))
        if line is not None:
            self._set_timer(line)

    def _set_timer(self, line: _Line) -> None:
        """Have the line woken when the next lease ends."""
        dues = [state.next_due_ms for state in self._leases.of(line.group, line.topic).values()]
        due_ms = min((due for due in dues if due is not None), default=None)
        if line.timer is not None:
            line.timer.close()
            line.timer = None
        if due_ms is not None:
            line.timer = self._timer(max(SOONEST_S, due_ms / 1000 - self._clock.monotonic() + SOONEST_S))
            line.timer.start(self.look, line.group, line.topic)

    def stop(self) -> None:
        """Let nobody wait any more, because the broker stops; those who wait are woken."""
        self._stopping = True
        for line in list(self._lines.values()):
            for one in line.members():
                one.wake()
