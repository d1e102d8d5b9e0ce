"""Administration: the export of all groups' offsets, now and in the past (docs/remoting.md)."""

from collections.abc import Callable, Iterator
from datetime import datetime

from metaq.client.connecting.core import Core
from metaq.client.connecting.transport import RemotingRequest, ask
from metaq.client.message import ReceivedMessage
from metaq.message import HISTORY_TOPIC
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.offsetrows import ExportOffsets, OffsetPage, OffsetRow, decode_lines, decode_page

Recorded = Callable[[str, datetime, datetime | None], Iterator[ReceivedMessage]]


class OffsetExport:
    """The export of all groups' offsets; made by ``Admin.offset_export``. Threads may share it."""

    def __init__(self, core: Core, query_by_time: Recorded) -> None:
        self._core = core
        self._query_by_time = query_by_time

    def pages(self, address: str) -> Iterator[OffsetPage]:
        """Yield pages with the current offsets of all groups at a broker; a page may report a ``problem``.

        Args:
            address: the broker's address, ``host:port``.

        Raises:
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        after: str | None = None
        while True:
            request = RemotingRequest.of(Request.EXPORT_OFFSETS, ExportOffsets(after=after))
            page = decode_page(ask(self._core.transport, address, request, self._core.deadline()).body)
            yield page
            after = page.next
            if after is None:
                return

    def history(self, begin: datetime, end: datetime | None = None) -> Iterator[OffsetRow]:
        """Yield the offsets that all masters recorded from ``begin`` on and before ``end``, broker by broker.

        Args:
            begin: the time of the first record.
            end: the time behind the last record; by default now.

        Raises:
            RouteNotFound: no registry answers, or no broker serves the topic; ``reason`` says why.
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        for message in self._query_by_time(HISTORY_TOPIC, begin, end):
            yield from decode_lines(message.body)
