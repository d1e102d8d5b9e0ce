"""Administration: delayed and recurring messages (docs/timers.md)."""

from base64 import b64encode
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from metaq.client.admin.views import read_due, read_object, read_recurring, read_timers
from metaq.client.connecting.core import Core
from metaq.client.connecting.transport import RemotingRequest, ask
from metaq.client.sending.cancelling import cancel
from metaq.errors import BadRequest
from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.recall import RecallHandle, encode_recall
from metaq.protocol.remoting.timers import RecurringRow, TimerRow

R = TypeVar("R", TimerRow, RecurringRow)


class TimerAdmin:
    """The administration of one broker's timers at a time; made by ``Admin.timers``. Threads may share it."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def pending(self, address: str) -> Iterator[TimerRow]:
        """Yield the messages that wait for their time, the first due first.

        Args:
            address: the broker's address, ``host:port``.

        Raises:
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        yield from self._pages(address, Request.LIST_TIMERS, {}, read_timers)

    def cancel(self, broker_name: str, timer: TimerRow) -> None:
        """Cancel a message that waits, as ``Client.cancel`` does for its sender.

        Args:
            broker_name: the name of the broker where it waits.
            timer: one of ``pending``.

        Raises:
            TooLate: the message was delivered before.
            UnknownHandle: the broker has no such message.
            RouteNotFound: the broker cannot be found; ``reason`` says why.
            Refused: the broker cannot cancel now, or the user may not send to the topic.
            ConnectionFailed: the broker cannot be reached.
            RequestTimeout: no answer in time; the message may be cancelled.
            BadRequest: it is the run of a recurring message, or cannot be read, or was shown to one who may only look.
        """
        if timer.topic is None or timer.handle is None:
            raise BadRequest(f"the message that is due at {timer.due_ms} has no handle by which it could be cancelled")
        handle = RecallHandle(timer.topic, broker_name, timer.due_ms, str(timer.id), timer.handle)
        cancel(self._core, encode_recall(handle), self._core.deadline())

    def stats(self, address: str) -> dict[str, Any]:
        """Return the broker's figures of timers, by the names that ``stats`` has.

        Args:
            address: the broker's address, ``host:port``.

        Raises:
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        return read_object(self._ask(address, Request.TIMER_STATS, {}))

    def recurring(self, address: str) -> Iterator[RecurringRow]:
        """Yield the recurring messages, by name.

        Args:
            address: the broker's address, ``host:port``.

        Raises:
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        yield from self._pages(address, Request.CRON, {"do": "list"}, read_recurring)

    def define(
        self,
        address: str,
        name: str,
        cron: str,
        topic: str,
        body: bytes,
        *,
        zone: str = "UTC",
        partition: int = -1,
        tag: str | None = None,
        flag: int = 0,
        missed: str = "last",
    ) -> int:
        """Define a recurring message, in place of one with this name; return when it comes first, in Unix milliseconds.

        Args:
            address: the broker's address, ``host:port``.
            name: the name by which it is replaced and ended.
            cron: when it comes, as ``0 2 * * *``, ``@every 90s`` or ``@daily``.
            topic: the topic that gets it.
            body: its body.
            zone: the time zone of ``cron``, as ``Europe/Berlin``.
            partition: the partition that gets it; by default each in turn.
            tag: its tag.
            flag: 32 bits for the program's own use.
            missed: what becomes of times that pass while the broker does not run: ``last``, ``all`` or ``none``.

        Raises:
            Refused: it cannot be defined; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        request = {
            "do": "define",
            "name": name,
            "cron": cron,
            "topic": topic,
            "body": b64encode(body).decode(),
            "zone": zone,
            "partition": partition,
            "attribute": tag,
            "flag": flag,
            "missed": missed,
        }
        return read_due(self._ask(address, Request.CRON, request))

    def undefine(self, address: str, name: str) -> None:
        """End a recurring message: no run comes any more.

        Args:
            address: the broker's address, ``host:port``.
            name: its name.

        Raises:
            Refused: the broker has none with this name.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        self._ask(address, Request.CRON, {"do": "undefine", "name": name})

    def _pages(
        self, address: str, code: Request, members: dict[str, Any], read: Callable[[bytes], tuple[list[R], str | None]]
    ) -> Iterator[R]:
        after: dict[str, Any] = {}
        while True:
            rows, following = read(self._ask(address, code, members | after))
            yield from rows
            if following is None:
                return
            after = {"after": following}

    def _ask(self, address: str, code: Request, members: dict[str, Any]) -> bytes:
        request = RemotingRequest.of(code, None, fastjson.encode(members))
        return bytes(ask(self._core.transport, address, request, self._core.deadline()).body)
