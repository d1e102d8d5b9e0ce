"""The offsets of groups, as a broker exports them, for tests."""

from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.offsetrows import Kind, OffsetPage, OffsetRow, decode_page
from tests.support.admin import ask, connect
from tests.support.broker import BrokerProcess


def page(broker: BrokerProcess, **fields: object) -> OffsetPage:
    """One answer to 30040."""
    with connect(broker) as client:
        return decode_page(ask(client, Request.EXPORT_OFFSETS, **fields).body)


def rows(broker: BrokerProcess, kind: Kind, group: str, topic: str) -> list[OffsetRow]:
    """A group in the partitions of a topic, as the first page has it."""
    return [row for row in page(broker).rows if (row.kind, row.group, row.topic) == (kind, group, topic)]
