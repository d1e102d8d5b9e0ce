"""Sending and reading messages over the remoting protocol, for tests."""

from typing import Final

from metaq.protocol.properties import parse
from metaq.protocol.record import Record, decode_record
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.headers import Int32, PullMessage, SendMessage, encode_header, with_letters
from tests.support.remoting import RemotingClient

BORN_MS: Final = 1_700_000_000_000
DEFAULT: Final = "TBW102"
WITH_SUBSCRIPTION: Final = Int32(4)
FAR: Final = 1 << 60


def send_header(topic: str, pairs: str = "", *, partition: int = 0, flag: int = 0, sys_flag: int = 0) -> SendMessage:
    """Return the header with which a producer sends a message."""
    numbers = (Int32(4), Int32(partition), Int32(sys_flag), BORN_MS, Int32(flag))
    return SendMessage("pg", topic, DEFAULT, *numbers, pairs)


def send(client: RemotingClient, header: SendMessage, body: bytes, code: int = Request.SEND_MESSAGE_V2) -> int:
    """Send without waiting; the opaque of the answer."""
    return client.send(code, with_letters(encode_header(header)), body)


def sent(client: RemotingClient, opaque: int) -> dict[str, str]:
    """The fields of the answer to a send that must have succeeded."""
    answer = client.response(opaque)
    assert answer.code == Response.SUCCESS, answer.remark
    return answer.fields


def _pull(topic: str, partition: int, offset: int) -> dict[str, str]:
    numbers = (Int32(partition), offset, Int32(1000), WITH_SUBSCRIPTION, 0, 0, 0)
    return encode_header(PullMessage("TOOLS_CONSUMER", topic, *numbers, "*", "TAG"))


def records(client: RemotingClient, topic: str, partition: int = 0) -> list[Record]:
    """All messages of a partition, in order."""
    found: list[Record] = []
    while True:
        answer = client.call(Request.PULL_MESSAGE, _pull(topic, partition, len(found)))
        if answer.code in (Response.PULL_NOT_FOUND, Response.TOPIC_NOT_EXIST):
            return found
        assert answer.code == Response.SUCCESS, answer
        at = 0
        while at < len(answer.body):
            record = decode_record(answer.body[at:])
            found.append(record)
            at += record.size


def count(client: RemotingClient, topic: str, partition: int = 0) -> int:
    """How many messages of a partition can be read, or could be once."""
    answer = client.call(Request.PULL_MESSAGE, _pull(topic, partition, FAR))
    return 0 if answer.code == Response.TOPIC_NOT_EXIST else int(answer.fields["maxOffset"])


def pairs_of(record: Record) -> dict[str, str]:
    """A record's properties."""
    return parse(record.properties.decode())
