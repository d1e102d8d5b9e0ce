"""Pops, and questions whether there is something to pop, that wait: for the disk, for others, or in line for messages."""

from metaq.engine.leases.leasing import Leasing
from metaq.engine.leases.planning import PopRequest
from metaq.engine.leases.popping import PopResult
from metaq.engine.leases.waiting import Waiting
from metaq.protocol.remoting.codes import Response
from metaq.protocol.remoting.headers import Int32, encode_header
from metaq.protocol.remoting.leases.pop import ALL_QUEUES, NotificationAnswer, PopAnswer
from metaq.server.remoting.consuming.popanswers import give_records
from metaq.server.remoting.reads import RemotingRead
from metaq.server.remoting.session import Answer
from metaq.server.wire.pops import LineRead, PopRead


class _Waits(LineRead, RemotingRead):
    """A request of this protocol that may wait in line."""

    def hold(self, place: Waiting) -> None:
        self.session.at_close(place.cancel)

    def release(self, place: Waiting) -> None:
        self.session.not_at_close(place.cancel)


class PopWait(PopRead, _Waits):
    """A pop in progress."""

    def give_nothing(self, *, is_full: bool) -> None:
        answer = PopAnswer(self.clock.now_ms(), self.wanted.invisible_ms, Int32(0), 0)
        code = Response.POLLING_FULL if is_full else Response.POLLING_TIMEOUT
        self.session.settle(self._request, Answer(code, encode_header(answer), "there is nothing to pop"))

    def give(self, result: PopResult) -> None:
        give_records(self.leasing.leases, self.session, self.session.owe(self._request), self.wanted, result)


class NoticeWait(_Waits):
    """A question whether there is something to pop, in progress."""

    def start(self, leasing: Leasing, asked: PopRequest, wait_ms: int) -> None:
        """Answer now, or once there are messages."""
        self.begin(leasing, wait_ms)
        self._asked = asked
        self.look()

    def look(self) -> None:
        asked = self._asked
        is_ready = self.leasing.pops.may_give(asked)
        is_full = self.may_wait and not self.leasing.lines.has_room()
        if not is_ready and self.may_wait and not is_full:
            self.wait(asked.group.name, asked.topic.name, asked.partitions)
        else:
            self.session.settle(self._request, _noticed(has_message=is_ready, is_full=is_full and not is_ready))


def partitions_of(queue: int) -> tuple[int, ...] | None:
    """Return the partitions that a ``queueId`` means; ``None``: all."""
    return None if queue == ALL_QUEUES else (queue,)


def _noticed(*, has_message: bool, is_full: bool) -> Answer:
    return Answer(fields=encode_header(NotificationAnswer(has_message, is_full)))
