"""A plain connection that speaks the remoting protocol, for what the load generator does not do."""

import itertools
import socket
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from benchmarks.figures import MeasurementError
from benchmarks.peers import REPLY_SECONDS
from metaq.protocol.remoting.codes import PULL_HAS_SUBSCRIPTION, PULL_SUSPENDS, Request, Response
from metaq.protocol.remoting.frames import FrameReader, RemotingCommand, encode_request
from metaq.protocol.remoting.headers import Int32, PullMessage, SendMessage, encode_header, with_letters
from metaq.protocol.remoting.leases.pop import FROM_FIRST, PopMessage

GROUP = "bench"
TEMPLATE_TOPIC = "TBW102"
RECEIVE_BYTES = 1 << 18
WINDOW = 500
LEASE_MS = 600_000


class Link:
    """One connection; answers are taken in whatever order they come."""

    def __init__(self, port: int, timeout_seconds: float = REPLY_SECONDS) -> None:
        """Connect; an answer that takes longer than the time-out raises."""
        self._socket = socket.create_connection(("127.0.0.1", port), timeout_seconds)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = FrameReader()
        self._opaques = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._socket.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, request: bytes) -> None:
        self._socket.sendall(request)

    def receive(self) -> list[RemotingCommand]:
        """The frames that the next bytes complete, perhaps none."""
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except TimeoutError as error:
            raise MeasurementError(f"no answer within {self._socket.gettimeout()} s") from error
        if not data:
            raise MeasurementError("the broker closed a connection")
        frames = self._reader.receive(data)
        if self._reader.error is not None:
            raise MeasurementError(f"the broker sent what is no frame: {self._reader.error}")
        return frames

    def pull(self, topic: str, partition: int, ordinal: int, hold_ms: int) -> bytes:
        """A request for messages of a partition, to be held while there are none."""
        flags = PULL_HAS_SUBSCRIPTION | (PULL_SUSPENDS if hold_ms else 0)
        header = PullMessage(
            consumer_group=GROUP,
            topic=topic,
            queue_id=Int32(partition),
            queue_offset=ordinal,
            max_msg_nums=Int32(32),
            sys_flag=Int32(flags),
            commit_offset=0,
            suspend_timeout_millis=hold_ms,
            sub_version=0,
            subscription="*",
            expression_type="TAG",
        )
        return encode_request(Request.PULL_MESSAGE, next(self._opaques), encode_header(header))

    def pop(self, topic: str, partition: int, hold_ms: int) -> bytes:
        """A request that leases messages of a partition, for ten minutes, to be held while there are none."""
        header = PopMessage(
            consumer_group=GROUP,
            topic=topic,
            queue_id=Int32(partition),
            max_msg_nums=Int32(32),
            invisible_time=LEASE_MS,
            poll_time=hold_ms,
            init_mode=Int32(FROM_FIRST),
        )
        return encode_request(Request.POP_MESSAGE, next(self._opaques), encode_header(header))

    def message(self, topic: str, partition: int, body: bytes, partitions: int = 1) -> bytes:
        """A request that stores a message; a topic that is not there gets so many partitions."""
        header = SendMessage(
            producer_group=GROUP,
            topic=topic,
            default_topic=TEMPLATE_TOPIC,
            default_topic_queue_nums=Int32(partitions),
            queue_id=Int32(partition),
            sys_flag=Int32(0),
            born_timestamp=1_790_000_000_000,
            flag=Int32(0),
            properties="",
        )
        return encode_request(Request.SEND_MESSAGE_V2, next(self._opaques), with_letters(encode_header(header)), body)

    def ask(self, code: int) -> RemotingCommand:
        """The answer to a request without header and body."""
        return self.ask_all([encode_request(code, next(self._opaques))])[0]

    def ask_all(self, requests: Iterable[bytes]) -> list[RemotingCommand]:
        """Ask in windows of WINDOW and return the answers; one that is no success raises."""
        answers: list[RemotingCommand] = []
        asking = iter(requests)
        for window in iter(lambda: list(itertools.islice(asking, WINDOW)), []):
            self.send(b"".join(window))
            wanted = len(answers) + len(window)
            while len(answers) < wanted:
                answers += succeeded(self.receive())
        return answers


def succeeded(answers: list[RemotingCommand]) -> list[RemotingCommand]:
    """The answers, when none of them is an error."""
    for answer in answers:
        if answer.code != Response.SUCCESS:
            raise MeasurementError(f"a request was answered with {answer.code}: {answer.remark}")
    return answers
