"""The replies to sends: kept while the messages become durable, then sent together."""

from typing import Final, NamedTuple

from metaq.engine.figures.counters import Counters
from metaq.engine.turn import Short
from metaq.errors import MetaqError
from metaq.protocol.remoting.codes import JSON, VERSION, Response
from metaq.protocol.remoting.frames import HEAD, encode_response
from metaq.server.remoting.session import RemotingSession

RECALL_HANDLE: Final = "recallHandle"
_SENT_JSON: Final = (
    b'{"code":%d,"extFields":{"queueId":"%d","TRACE_ON":"true","MSG_REGION":"DefaultRegion","msgId":"%b","queueOffset":"%d"'
    b'%b},"flag":1,"language":"JAVA","opaque":%d,"serializeTypeCurrentRPC":"JSON","version":%d}'
)
_RECALL_JSON: Final = b',"recallHandle":"%b"'


class Sent(NamedTuple):
    """The reply to one send, which is valid when the turn's append succeeds.

    It keeps no reference to the request: freed at once, the request's memory is still in the processor's cache for the next
    one.
    """

    opaque: int
    serialization: int
    partition: int
    queue_offset: int
    ids: bytes
    """Offset message ids, separated by commas."""
    more: tuple[str, str] | None
    """One more field and its value: of a transactional message its unique id, of a delayed one its handle."""

    def encode(self, code: int) -> bytes:
        opaque, serialization, partition, queue_offset, ids, more = self
        if serialization == JSON and (more is None or more[0] == RECALL_HANDLE):
            last = b"" if more is None else _RECALL_JSON % more[1].encode()  # base64, of which JSON escapes nothing
            header = _SENT_JSON % (code, partition, ids, queue_offset, last, opaque, VERSION)
            return HEAD.pack(4 + len(header), len(header)) + header
        fields = {
            "queueId": str(partition),
            "TRACE_ON": "true",
            "MSG_REGION": "DefaultRegion",
            "msgId": ids.decode(),
            "queueOffset": str(queue_offset),
        }
        if more is not None:
            fields[more[0]] = more[1]
        return encode_response(self, code, fields)


class SendOutcome:
    """The replies to one session's sends of one turn."""

    __slots__ = ("_counters", "_session", "requests", "sent", "size", "turn")

    def __init__(self, session: RemotingSession, turn: int, counters: Counters) -> None:
        self._session = session
        self._counters = counters
        self.turn = turn
        self.requests = 0
        self.sent: list[Sent] = []
        """The replies due: one per request, except one-way requests."""
        self.size = 0

    def stored(self) -> None:
        self._pay([sent.encode(Response.SUCCESS) for sent in self.sent])

    def late(self, short: Short) -> None:
        self._pay([sent.encode(short.code) for sent in self.sent])

    def refused(self, error: MetaqError, outcome: str) -> None:
        remark = f"the message {outcome}: {error}"
        self._counters.refuse(error, self.requests)
        self._pay([encode_response(sent, error.code, remark=remark) for sent in self.sent])

    def _pay(self, replies: list[bytes]) -> None:
        self._counters.put.add(self.requests, self.size)
        self._session.answer(len(replies), self.size, b"".join(replies))
