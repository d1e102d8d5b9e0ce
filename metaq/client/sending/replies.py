"""Request and reply: the replies that a client waits for (specs: remoting protocol, section 3.2.9)."""

import socket
import struct
import threading
import time
import uuid
from types import TracebackType
from typing import Final, Self

from metaq.address import parse_address
from metaq.checksum import crc32
from metaq.client.connecting.core import CONTROL_TIMEOUT_S, Core
from metaq.client.connecting.forks import renewed_in_children
from metaq.client.connecting.transport import ClientAnswer
from metaq.client.message import CORRELATION_ID, ReceivedMessage
from metaq.errors import BadRequest, RequestTimeout
from metaq.message import MessageQueue
from metaq.protocol.properties import parse
from metaq.protocol.record import MAGIC
from metaq.protocol.remoting.codes import Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import PushReply, decode_header

_HOST: Final = struct.Struct(">4si")


class Expected:
    """A reply that a caller waits for; a context manager that ends the waiting."""

    def __init__(self, replies: "Replies") -> None:
        self.correlation = uuid.uuid4().hex
        self._replies = replies
        self._arrived = threading.Event()
        self._reply: ReceivedMessage | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._replies.forget(self)

    def arrive(self, reply: ReceivedMessage) -> None:
        """Set the reply, and wake the thread that waits."""
        self._reply = reply
        self._arrived.set()

    def wait(self, deadline: float, topic: str) -> ReceivedMessage:
        """Return the reply; ``RequestTimeout`` when none comes. Then it is unknown whether a consumer got the request."""
        if not self._arrived.wait(max(0.0, deadline - time.monotonic())):
            raise RequestTimeout(f"no reply to the request to topic {topic} in time; check that a consumer of it calls reply()")
        assert self._reply is not None
        return self._reply


class Replies:
    """All replies that a client waits for, by correlation id."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._renew()
        core.on_reply = self._arrived
        renewed_in_children(self)

    def _renew(self) -> None:
        """Forget all requests in a child of a fork, where no broker knows this client yet."""
        self._waiting: dict[str, Expected] = {}
        self._known_to: set[str] = set()

    def expect(self) -> Expected:
        """Return a new expected reply, which is recognized from now on."""
        expected = Expected(self)
        self._waiting[expected.correlation] = expected
        return expected

    def forget(self, expected: Expected) -> None:
        """Stop waiting for a reply; if it still comes, it is dropped."""
        self._waiting.pop(expected.correlation, None)

    def ensure_known(self, deadline: float) -> None:
        """Make sure that every broker has had a heartbeat, because any of them may have to pass a reply on to this client."""
        brokers = self._core.routes.broker_addresses(masters_only=True)
        if not brokers or not brokers <= self._known_to:
            self._core.heartbeat(wait_s=max(0.0, min(CONTROL_TIMEOUT_S, deadline - time.monotonic())))
            self._known_to |= brokers

    def _arrived(self, request: RemotingCommand) -> ClientAnswer:
        header = decode_header(PushReply, request.fields)
        correlation = parse(header.properties or "").get(CORRELATION_ID, "")
        expected = self._waiting.pop(correlation, None)
        if expected is None:
            return ClientAnswer(Response.SYSTEM_ERROR, remark=f"nobody waits for a reply to {correlation!r} (any more)")
        expected.arrive(_message(header, request.body, self._core.max_inflated_bytes))
        return ClientAnswer()


def _message(header: PushReply, body: bytes, most: int) -> ReceivedMessage:
    """Make a message of a reply, as if it were in a log; its offsets are 0."""
    head = (0, MAGIC, crc32(body), header.queue_id, header.flag, 0, 0, header.sys_flag, header.born_timestamp)
    hosts = (_host(header.born_host), header.store_timestamp, _host(header.store_host), header.reconsume_times, 0, len(body))
    queue = MessageQueue(header.topic, "", header.queue_id)
    return ReceivedMessage(head + hosts, body, (header.properties or "").encode(), queue, most)


def _host(address: str) -> bytes:
    try:
        host, port = parse_address(address, lowest_port=0)
        return _HOST.pack(socket.inet_aton(host), port)
    except (OSError, ValueError, struct.error) as error:
        raise BadRequest(f"{address!r} is not an IPv4 address with a port") from error
