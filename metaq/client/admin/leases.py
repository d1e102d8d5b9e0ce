"""Administration: leased messages (docs/leases.md)."""

from collections.abc import Iterator
from typing import Any, TypeVar

from metaq.client.admin.views import read_leases
from metaq.client.connecting.core import Core
from metaq.client.connecting.transport import RemotingRequest, ask
from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.leases.figures import OpenRow, PlaceRow, TopicRow

R = TypeVar("R", PlaceRow, OpenRow, TopicRow)


class LeaseAdmin:
    """The administration of one broker's leases at a time; made by ``Admin.leases``. Threads may share it."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def partitions(self, address: str, group: str, topic: str | None = None) -> Iterator[PlaceRow]:
        """Yield the partitions in which a group leases messages, by topic and number.

        Args:
            address: the broker's address, ``host:port``.
            group: the name of the group.
            topic: the topic; by default all topics of the group.

        Raises:
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        members = {"group": group} if topic is None else {"group": group, "topic": topic}
        yield from self._rows(address, Request.LIST_LEASES, members, PlaceRow)

    def messages(self, address: str, group: str, topic: str, partition: int) -> Iterator[OpenRow]:
        """Yield the messages of a partition that were given to a group and are not finished, the lowest first.

        Args:
            address: the broker's address, ``host:port``.
            group: the name of the group.
            topic: the name of the topic.
            partition: the number of the partition.

        Raises:
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        members = {"group": group, "topic": topic, "partition": partition}
        yield from self._rows(address, Request.LIST_OPEN_MESSAGES, members, OpenRow)

    def topics(self, address: str, group: str) -> Iterator[TopicRow]:
        """Yield the topics of which a group leases messages, by name.

        Args:
            address: the broker's address, ``host:port``.
            group: the name of the group.

        Raises:
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        yield from self._rows(address, Request.LEASE_STATS, {"group": group}, TopicRow)

    def _rows(self, address: str, code: Request, members: dict[str, Any], kind: type[R]) -> Iterator[R]:
        after: dict[str, Any] = {}
        while True:
            request = RemotingRequest.of(code, None, fastjson.encode(members | after))
            body = bytes(ask(self._core.transport, address, request, self._core.deadline()).body)
            rows, following = read_leases(body)
            yield from (kind(*(row[name] for name in kind._fields)) for row in rows)
            if following is None:
                return
            after = {"after": following}
