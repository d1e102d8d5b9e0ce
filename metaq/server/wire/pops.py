"""Pops of all protocols: read a plan, take it, and wait in line when there is nothing."""

from collections.abc import Sequence
from math import inf
from typing import Final

from metaq.engine.leases.leasing import Leasing
from metaq.engine.leases.planning import Plan, PopRequest
from metaq.engine.leases.popping import PopResult
from metaq.engine.leases.waiting import Waiting
from metaq.errors import Overloaded
from metaq.server.wire.reads import StoreRead, StoreReads
from metaq.store.files.filecache import Read

TRIES: Final = 8
"""Plans for one pop, when others change the leases meanwhile or nothing matches; then it waits in line."""
RETRY_MS: Final = 100
LOOK_S: Final = 0.1
"""The pause before another look, when something may have come while a plan waited for the disk."""


class LineRead(StoreRead):
    """A request that may wait in line for messages, for a limited time."""

    # no __slots__: it is mixed with the read of a protocol

    def begin(self, leasing: Leasing, wait_ms: int) -> None:
        """Remember how long it may wait."""
        self.leasing = leasing
        self.clock = leasing.leases.context.store.clock
        self.deadline_s = self.clock.monotonic() + wait_ms / 1000
        self.number = 0
        self.place: Waiting | None = None

    @property
    def may_wait(self) -> bool:
        """True while its client may send more, and so is there, and its time is not over."""
        return not self.session.ended and self.deadline_s > self.clock.monotonic()

    def wait(self, group: str, topic: str, partitions: Sequence[int] | None, most_s: float = inf) -> None:
        """Wait in line, at the place that the request had there before; look after ``most_s`` in any case."""
        self.defer()
        lines = self.leasing.lines
        self.number = self.number or lines.next_number()
        seconds = min(most_s, self.deadline_s - self.clock.monotonic())
        place = lines.wait(
            group,
            topic,
            number=self.number,
            again=self._again,
            partitions=partitions,
            seconds=seconds,
            client=self.session,
            over=self._expire,
        )
        self.place = place
        self.hold(place)

    def _again(self) -> None:
        place, self.place = self.place, None
        if place is not None:
            self.release(place)
        self.look()

    def _expire(self) -> None:
        self.deadline_s = self.clock.monotonic()
        self._again()

    def look(self) -> None:
        """Look whether there is something now."""
        raise NotImplementedError

    def hold(self, place: Waiting) -> None:
        """Have the session cancel the wait when its connection closes."""
        raise NotImplementedError

    def release(self, place: Waiting) -> None:
        """Undo ``hold``."""
        raise NotImplementedError


class PopRead(LineRead):
    """A pop in progress."""

    def start(self, leasing: Leasing, reads: StoreReads, wanted: PopRequest, wait_ms: int) -> None:
        """Answer now, or once there are messages."""
        self.begin(leasing, wait_ms)
        self.reads = reads
        self.wanted = wanted
        self.tries = 0
        self.look()

    def look(self) -> None:
        self.wakes = self.leasing.lines.wakes
        self.reads.start(self)

    def read(self, read: Read) -> Plan:
        group = self.leasing.leases.context.groups.imagine(self.wanted.group.name)
        if group is not self.wanted.group:  # it was changed, or deleted, while the pop waited
            self.wanted = self.wanted._replace(group=group)
        return self.leasing.pops.plan(self.wanted, read)

    def found(self, plan: Plan) -> None:
        """Take the plan and answer; plan again when others were faster, and wait in line when there is nothing."""
        if self.session.closed or (self.number and self.session.ended):  # else messages were leased to nobody
            self._miss(is_full=False)
            return
        if plan:
            self.leasing.leases.context.groups.ensure(self.wanted.group.name)
        result = self.leasing.pops.take(self.wanted, plan)
        if plan and (result is None or not result.given):
            self.tries += 1
            if self.tries < TRIES:
                self.look()
                return
        if result is None:
            raise Overloaded(f"others took the messages of {TRIES} plans of this pop", retry_after_ms=RETRY_MS)
        if result.given:
            self.defer()
            self.give(result)
            return
        self.tries = 0
        is_full = self.may_wait and not self.leasing.lines.has_room()
        if self.may_wait and not is_full:
            most_s = inf if self.leasing.lines.wakes == self.wakes else LOOK_S
            self.wait(self.wanted.group.name, self.wanted.topic.name, self.wanted.partitions, most_s)
            return
        self._miss(is_full=is_full)

    def _miss(self, *, is_full: bool) -> None:
        context = self.leasing.leases.context
        context.counters.get_miss.add(1)
        context.topic_counters(self.wanted.topic.name).get_miss.add(1)
        self.give_nothing(is_full=is_full)

    def give(self, result: PopResult) -> None:
        """Answer with messages once their leases are granted."""
        raise NotImplementedError

    def give_nothing(self, *, is_full: bool) -> None:
        """Answer that there is nothing; ``is_full``: too many wait already."""
        raise NotImplementedError
