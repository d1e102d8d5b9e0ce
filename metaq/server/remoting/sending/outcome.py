"""The replies to sends: kept while the messages become durable, then sent together."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from librt.strings import BytesWriter, write_i64_be

from metaq.engine.figures.counters import Counters
from metaq.engine.turn import Short
from metaq.errors import MetaqError
from metaq.protocol.remoting.codes import JSON, VERSION, Response
from metaq.protocol.remoting.frames import encode_response, frame_head
from metaq.server.wire.session import Session

RECALL_HANDLE: Final = "recallHandle"
SUCCESS: Final = int(Response.SUCCESS)
SENT_BYTES: Final = 208
"""What a reply that is due takes of memory beside the body of its send: a tuple of seven, and three numbers."""


class Sent(NamedTuple):
    """The reply to one send, which is valid when the turn's append succeeds.

    It keeps no reference to the request: freed at once, the request's memory is still in the processor's cache for the next
    one.
    """

    opaque: int
    serialization: int
    partition: int
    queue_offset: int
    log_offset: int
    following: Sequence[int] = ()
    """The log offsets of the other messages of a batch."""
    more: tuple[str, str] | None = None
    """One more field and its value: of a transactional message its unique id, of a delayed one its handle."""


def _ids(host: str, log_offset: int, following: Sequence[int]) -> str:
    """Return the ids of messages, with commas in between: address and log offset of each, in hexadecimal digits."""
    offsets = BytesWriter()
    write_i64_be(offsets, log_offset)
    for each in following:
        write_i64_be(offsets, each)
    digits = offsets.getvalue().hex(",", 8).upper()
    return host + (digits.replace(",", f",{host}") if following else digits)


def encode_sent(sent: Sent, code: int, host: str) -> bytes:
    """Return a reply; ``host`` is the broker's address in the ids of messages, in hexadecimal digits."""
    opaque, serialization, partition, queue_offset, log_offset, following, more = sent
    ids = _ids(host, log_offset, following)
    if serialization == JSON and (more is None or more[0] == RECALL_HANDLE):
        last = "" if more is None else f',"recallHandle":"{more[1]}"'  # base64, of which JSON escapes nothing
        header = (
            f'{{"code":{code},"extFields":{{"queueId":"{partition}","TRACE_ON":"true","MSG_REGION":"DefaultRegion",'
            f'"msgId":"{ids}","queueOffset":"{queue_offset}"{last}}},"flag":1,"language":"JAVA","opaque":{opaque},'
            f'"serializeTypeCurrentRPC":"JSON","version":{VERSION}}}'
        ).encode()
        return frame_head(len(header)) + header
    fields = {
        "queueId": str(partition),
        "TRACE_ON": "true",
        "MSG_REGION": "DefaultRegion",
        "msgId": ids,
        "queueOffset": str(queue_offset),
    }
    if more is not None:
        fields[more[0]] = more[1]
    return encode_response(sent, code, fields)


class SendOutcome:
    """The replies to one session's sends of one turn."""

    __slots__ = ("_counters", "_host", "_session", "requests", "sent", "size", "turn")

    def __init__(self, session: Session, turn: int, counters: Counters, host: str) -> None:
        """Begin without any; ``host`` as in ``encode_sent``."""
        self._session = session
        self._host = host
        self._counters = counters
        self.turn = turn
        self.requests = 0
        self.sent: list[Sent] = []
        """The replies due: one per request, except one-way requests."""
        self.size = 0
        """The bytes of the bodies."""

    def stored(self) -> None:
        self._pay([encode_sent(sent, SUCCESS, self._host) for sent in self.sent])

    def late(self, short: Short) -> None:
        self._pay([encode_sent(sent, short.code, self._host) for sent in self.sent])

    def refused(self, error: MetaqError, outcome: str) -> None:
        remark = f"the message {outcome}: {error}"
        self._counters.refuse(error, self.requests)
        self._pay([encode_response(sent, error.code, remark=remark) for sent in self.sent])

    def _pay(self, replies: list[bytes]) -> None:
        self._counters.put.add(self.requests, self.size)
        self._session.answer(len(replies), self.size + SENT_BYTES * len(replies), b"".join(replies))
