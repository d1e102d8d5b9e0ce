"""The requests of one connection. Plain sends and acks of one pop, which come again and again, are compared, not parsed."""

from metaq.protocol.remoting.codes import JSON
from metaq.protocol.remoting.frames import FrameCutter, RemotingCommand, decode_frame
from metaq.protocol.remoting.leases.plainacks import ACK, AckReader, PlainAcks
from metaq.protocol.remoting.sending.plain import BATCH, SEND, KnownHeads, PlainSend, SendReader

Received = RemotingCommand | PlainSend | PlainAcks


class RequestReader(FrameCutter):
    """The parser of a connection's bytes into requests, some of them as plain sends and plain acks."""

    def __init__(self, known: KnownHeads) -> None:
        """``known`` is a cache of the headers of sends that the readers of one broker share."""
        super().__init__()
        self._sends = SendReader(known)
        self._acks = AckReader()
        self._run: PlainAcks | None = None  # the request received last, to which acks like it are added
        self._received: list[Received] = []

    def receive(self, data: bytes) -> list[Received]:
        """Return the requests that ``data`` completes. ``error`` is as that of a ``FrameReader``."""
        self._cut(data)
        received, self._received = self._received, []
        self._run = None
        return received

    def _take(self, data: bytes, start: int, end: int, stop: int, serialization: int) -> None:
        if serialization:
            self._run = None
            self._received.append(decode_frame(data[start:end], data[end:stop], serialization))
            return
        acks = self._acks
        if acks.knows and end == stop:
            offset = acks.read(data, start, end)
            if offset >= 0:
                self._add_ack(offset, acks.opaque)
                return
        self._run = None
        send = self._sends.read(data, start, end, stop)
        if send is not None:
            self._received.append(send)
        else:
            self._parse(data[start:end], data[end:stop])

    def _add_ack(self, offset: int, opaque: int) -> None:
        run = self._run
        if run is None:
            self._run = run = self._acks.begun()
            self._received.append(run)
        run.offsets.append(offset)
        run.opaques.append(opaque)

    def _parse(self, header: bytes, body: bytes) -> None:
        request = decode_frame(header, body, JSON)
        run = None
        if request.code in {SEND, BATCH}:
            self._sends.learn(header, request)
        elif request.code == ACK:
            self._run = run = self._acks.learn(header, request)
        self._received.append(request if run is None else run)
