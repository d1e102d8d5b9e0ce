"""Mutated recordings of RocketMQ clients, and frames that no client sends, against a real broker.

Many connections, one after the other and some side by side, send the recordings of ``tests/wire``, with bytes flipped, lost,
added or doubled, fields left out or replaced by numbers at and beyond every limit, bodies cut, false lengths; and requests of
administrators. They read all answers, or none and hang up, or none and stay open. Meanwhile control connections put and get,
over both protocols.

What must hold: the process lives and prints no traceback; the control connections are served correctly all along, and in the
end all that they sent is there; every request gets exactly one response, with its opaque, and no one-way request does; memory
in use goes down again.

``python -m tests.crash.frames --seed 7 --count 300000`` runs it; a failure names the seed and the connection.
"""

import contextlib
import json
import select
import socket
import struct
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from metaq.protocol.remoting.codes import COMPACT, JSON, Request
from metaq.protocol.remoting.frames import FrameReader, RemotingCommand, encode_request, encode_response
from metaq.protocol.remoting.signature import Credentials
from tests.crash.attack import (
    MAX_GROWTH_KB,
    SETTLE_DEADLINE_S,
    Attack,
    Chance,
    converse,
    hang_up,
    main,
    send_some,
)
from tests.crash.command import Result, Violation
from tests.crash.garbage import NUMBERS, Control
from tests.support.broker import SOCKET_TIMEOUT_S, BrokerProcess, FreshBroker, wait_until
from tests.support.messages import records, send, send_header, sent
from tests.support.metrics import Values
from tests.support.users import SigningClient
from tests.support.wire import random_slices
from tests.wire.recordings import read_recordings

# Limits that are met often, holds that end soon, and little that is no leak but takes memory: topics, groups, what is mapped.
FLAGS: Final = (
    "--max-message-bytes=8192",
    "--max-unsent-bytes=65536",
    "--max-hold-ms=3",
    f"--segment-bytes={2 << 20}",
    "--max-topics=300",
    "--max-groups=100",
    "--index-slots=10000",
    "--index-entries=40000",
)
MOST_TURN_MS: Final = 100
"""Of the processor for one turn of the loop: 10 for all requests together, 20 for one, and room for slow machines."""
CONTROL_TOPIC: Final = "control-frames"
FIRST_BYTES: Final = (0, 1)
"""With which a connection speaks this protocol."""

RECORDED: Final = [recording.frames for recording in read_recordings()]
TEXTS: Final = [
    *NUMBERS,
    "true",
    "null",
    "%RETRY%g",
    "SCHEDULE_TOPIC_XXXX",
    "a\x01b\x02",
    "DELAY\x0199\x02",
    "ß" * 100,
    "x" * 40_000,
]
LOOKS: Final[list[tuple[int, dict[str, str]]]] = [
    (Request.GET_ALL_TOPIC_CONFIG, {}),
    (Request.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, {}),
    (Request.GET_ALL_CONSUMER_OFFSET, {}),
    (Request.GET_ALL_DELAY_OFFSET, {}),
    (Request.GET_BROKER_CONFIG, {}),
    (Request.GET_BROKER_RUNTIME_INFO, {}),
    (Request.GET_TOPIC_STATS_INFO, {"topic": "ways"}),
    (Request.GET_CONSUME_STATS, {"consumerGroup": "ways-consumers"}),
    (Request.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": "ways-consumers"}),
    (Request.GET_PRODUCER_CONNECTION_LIST, {"producerGroup": "ways-producers"}),
    (Request.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "ways-consumers"}),
    (Request.QUERY_TOPIC_CONSUME_BY_WHO, {"topic": "ways"}),
    (Request.QUERY_CONSUME_TIME_SPAN, {"topic": "ways", "group": "ways-consumers"}),
    (Request.GET_MAX_OFFSET, {"topic": "ways", "queueId": "0"}),
    (Request.GET_MIN_OFFSET, {"topic": "ways", "queueId": "0"}),
    (Request.SEARCH_OFFSET_BY_TIMESTAMP, {"topic": "ways", "queueId": "0", "timestamp": "1"}),
    (Request.GET_EARLIEST_MSG_STORETIME, {"topic": "ways", "queueId": "0"}),
    (Request.QUERY_CONSUME_QUEUE, {"topic": "ways", "queueId": "0", "index": "0", "count": "10"}),
    (Request.VIEW_MESSAGE_BY_ID, {"offset": "0"}),
    (Request.VIEW_BROKER_STATS_DATA, {"statsName": "TOPIC_PUT_NUMS", "statsKey": "ways"}),
    (Request.GET_CONSUMER_RUNNING_INFO, {"consumerGroup": "ways-consumers", "clientId": "nobody"}),
    (Request.CONSUME_MESSAGE_DIRECTLY, {"consumerGroup": "ways-consumers", "clientId": "nobody", "msgId": "00"}),
    (Request.INVOKE_BROKER_TO_RESET_OFFSET, {"topic": "ways", "group": "ways-consumers", "timestamp": "0", "isForce": "true"}),
    (Request.GET_BROKER_CLUSTER_INFO, {}),
    (Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, {}),
    (Request.GET_KVLIST_BY_NAMESPACE, {"namespace": "ORDER_TOPIC_CONFIG"}),
    (Request.END_TRANSACTION, {"producerGroup": "g", "commitLogOffset": "0"}),
    (Request.CHECK_CLIENT_CONFIG, {}),
    (29_999, {}),
]
"""What recordings have little of: requests that look, and some that change what garbage owns."""


# -- frames -----------------------------------------------------------------------------------------------------------


def recorded(chance: Chance) -> list[bytes]:
    """Some frames of a recording, in their order."""
    frames = chance.choice(RECORDED)
    begin = chance.randrange(len(frames))
    return frames[begin : begin + chance.randrange(1, 12)]


def commanded(chance: Chance) -> list[bytes]:
    """Requests of an administrator, in either serialization."""
    frames = []
    for _ in range(chance.randrange(1, 5)):
        code, fields = chance.choice(LOOKS)
        body = chance.choice((b"", b"{}", b"[]", b'{"clientID":1}', chance.randbytes(20)))
        frames.append(encode_request(code, chance.randrange(100), fields, body, serialization=chance.choice((JSON, COMPACT))))
    return frames


def flipped(chance: Chance) -> list[bytes]:
    """A recording with a few bytes flipped, lost, added or doubled, anywhere."""
    data = bytearray(b"".join(recorded(chance)))
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(4):
            case 0 if at < len(data):
                data[at] ^= 1 << chance.randrange(8)
            case 1:
                del data[at : at + chance.randrange(1, 8)]
            case 2:
                data[at:at] = chance.choice((b" ", b"\0", b"\xff\xff\xff\xff", chance.randbytes(4)))
            case _:
                data[at:at] = data[at : at + 20]
    return [bytes(data)]


def changed(chance: Chance) -> list[bytes]:
    """Frames whose lengths are right and whose fields or bodies are not."""
    frames = []
    for frame in recorded(chance) if chance.random() < 0.8 else commanded(chance):
        (command,) = FrameReader().receive(frame)
        fields, body, code = dict(command.fields), bytearray(command.body), command.code
        for _ in range(chance.randrange(3)):
            if fields:
                name = chance.choice(sorted(fields))
                if chance.random() < 0.3:
                    del fields[name]
                else:
                    fields[name] = chance.choice(TEXTS)
        if body and chance.random() < 0.5:
            at = chance.randrange(len(body))
            body[at : at + chance.randrange(4)] = chance.randbytes(chance.randrange(4))
        if chance.random() < 0.1:
            code = chance.choice(HARMLESS)
        serialization = chance.choice((command.serialization, JSON, COMPACT))
        oneway = command.is_oneway or chance.random() < 0.1
        frames.append(encode_request(code, command.opaque, fields, bytes(body), oneway=oneway, serialization=serialization))
    return frames


HARMLESS: Final = sorted({code for code, _ in LOOKS} | {Request.SEND_MESSAGE_V2, Request.PULL_MESSAGE, Request.HEART_BEAT})


def lying(chance: Chance) -> list[bytes]:
    """A frame whose first eight bytes say something else than what follows."""
    frame = bytearray(chance.choice(recorded(chance)))
    length, header = struct.unpack_from(">iI", frame)
    length = chance.choice((length + chance.randrange(-9, 10), chance.choice((0, 3, 4, 1 << 24, (1 << 31) - 1, -1))))
    header = chance.choice((header + chance.randrange(-9, 10), chance.choice((0, 2 << 24, 0xFFFFFF, 0x1FFFFFF))))
    struct.pack_into(">iI", frame, 0, length, header % (1 << 32))
    return [bytes(frame)]


def json_headers(chance: Chance) -> list[bytes]:
    """JSON headers with values that no client writes."""
    odd: list[object] = [None, 0, -1, 1.5, True, [], {}, "", "7", 1 << 40, [[]] * 3]
    names = ("code", "opaque", "flag", "version", "extFields", "language", "remark")
    header = {name: chance.choice(odd) for name in names}
    fields = {"topic": chance.choice(odd), "queueId": chance.choice(odd)}
    plain = {"code": chance.choice(HARMLESS), "opaque": chance.randrange(9), "flag": 0, "extFields": fields}
    header.update({name: value for name, value in plain.items() if chance.random() < 0.8})
    data = json.dumps(header).encode()
    return [struct.pack(">iI", 4 + len(data), len(data)) + data]


def noise(chance: Chance) -> list[bytes]:
    """Random bytes."""
    return [chance.choice((b"", b"\0", b"\0\0\0\1")) + chance.randbytes(chance.randrange(1, 200))]


Kind = Callable[[Chance], list[bytes]]
KINDS: Final[list[Kind]] = [
    recorded,
    commanded,
    flipped,
    flipped,
    changed,
    changed,
    lying,
    json_headers,
    noise,
]


PROBE: Final = encode_request(0, 0)


class Stream(NamedTuple):
    """The bytes that one connection sends, and what the broker must make of them."""

    data: bytes
    frames: int
    requests: list[RemotingCommand]
    """What the broker must make of it, up to where the stream is lost."""
    lost: bool
    """Whether the broker must close."""
    whole: bool
    """Whether it ends where a frame ends."""


def draw_stream(chance: Chance, every_kind: list[Kind] = KINDS, usual: Kind = recorded) -> Stream:
    """Frames of one kind or of all, until there are enough or the broker no longer listens."""
    kinds = every_kind if chance.random() < 0.3 else [chance.choice(every_kind), usual]
    reader = FrameReader()
    data, requests = b"", list[RemotingCommand]()
    frames = silent = 0
    wanted = chance.choice((1, 5, 30, 30, 30, 200))
    while frames < wanted and reader.error is None and silent < 5:
        for frame in chance.choice(kinds)(chance):
            data += frame
            frames += 1
            found = reader.receive(frame)
            silent = 0 if found else silent + 1
            requests += [command for command in found if not command.is_response]
            if reader.error is not None:
                break
    lost = reader.error is not None
    return Stream(data or b"\0", frames, requests, lost, bool(data) and not lost and len(reader.receive(PROBE)) == 1)


# -- connections ------------------------------------------------------------------------------------------------------


class Talk:
    """One connection on which everything is read, and what the broker asks is answered in some way."""

    def __init__(self, connection: socket.socket, stream: Stream, pieces: list[bytes], chance: Chance) -> None:
        self._connection = connection
        self._stream = stream
        self._pending = pieces
        self._chance = chance
        self._reader = FrameReader()
        self.responses: list[RemotingCommand] = []

    def collect(self) -> None:
        """Until each request is answered or the broker closes."""
        stream = self._stream
        due = sum(not request.is_oneway for request in stream.requests)
        ended = False
        poll = select.poll()
        while not ended and (self._pending or len(self.responses) < due or stream.lost):
            poll.register(self._connection, select.POLLIN | (select.POLLOUT if self._pending else 0))
            events = poll.poll(SOCKET_TIMEOUT_S * 1000)
            if not events:
                asked = Counter(request.code for request in stream.requests)
                raise Violation(f"{due} responses are due, {len(self.responses)} came; asked were {asked}")
            try:
                ended = not self._receive() if events[0][1] & ~select.POLLOUT else not self._send()
            except (ConnectionResetError, BrokenPipeError):
                ended = True  # the broker closed on bytes that it had not read
        if self._reader.error is not None:
            raise Violation(f"the broker sent what is no frame: {self._reader.error}")
        if ended and not stream.lost:
            raise Violation(f"the broker closed a connection that was in step; {len(self.responses)} of {due} responses came")

    def _send(self) -> bool:
        sent_bytes = self._connection.send(self._pending[0])
        self._pending[0] = self._pending[0][sent_bytes:]
        if not self._pending[0]:
            del self._pending[0]
        return True

    def _receive(self) -> bool:
        """Receive data, prepare answers to the broker's requests, and return whether there was any data."""
        data = self._connection.recv(1 << 16)
        for frame in self._reader.receive(data):
            if frame.is_response:
                self.responses.append(frame)
            elif not frame.is_oneway and self._stream.whole:
                body = self._chance.choice((b"", b"{}", b"{{}:[]}", self._chance.randbytes(9)))
                code = self._chance.choice((0, 0, 1, 99))
                self._pending.append(encode_response(frame, code, {}, body_size=len(body)) + body)
        return bool(data)


def check_responses(stream: Stream, responses: list[RemotingCommand]) -> None:
    """Each answers a request that wants an answer, in its serialization, and none is missing unless the stream was lost."""
    due = Counter((request.opaque, request.serialization) for request in stream.requests if not request.is_oneway)
    came = Counter((response.opaque, response.serialization) for response in responses)
    if came - due:
        raise Violation(f"responses to nothing that was asked: {came - due}")
    if due - came and not stream.lost:
        raise Violation(f"no responses to {due - came}")


class RemotingControl:
    """A well-behaved client that notices at once when it is not served as it should be."""

    def __init__(self, broker: BrokerProcess, who: Credentials | None = None) -> None:
        self._client = SigningClient(broker.host, broker.port, who, timeout_s=SOCKET_TIMEOUT_S)
        self._bodies: list[bytes] = []

    def check(self, chance: Chance) -> None:
        """Send a message; its place is the next one."""
        body = chance.randbytes(40)
        place = sent(self._client, send(self._client, send_header(CONTROL_TOPIC, "TAGS\x01t\x02"), body))
        if place["queueOffset"] != str(len(self._bodies)):
            raise Violation(f"message {len(self._bodies)} of the control connection was stored at {place}")
        self._bodies.append(body)

    def check_all(self) -> None:
        """Everything that was sent is there, and nothing else."""
        found = [bytes(record.body) for record in records(self._client, CONTROL_TOPIC)]
        if found != self._bodies:
            raise Violation(f"the control topic has {len(found)} messages, {len(self._bodies)} were sent; or they differ")

    def close(self) -> None:
        self._client.close()


# -- the run ----------------------------------------------------------------------------------------------------------


class FrameAttack(Attack[Stream]):
    """A broker under mutated frames. Control connections of both protocols put and get all along, as ``control`` if given."""

    def __init__(self, broker: BrokerProcess, seed: int, control: Credentials | None = None) -> None:
        super().__init__(broker, seed)
        self._secret = "" if control is None else control.secret
        self._text = Control(broker, control)
        self._remoting = RemotingControl(broker, control)

    def draw(self, chance: Chance) -> Stream:
        return draw_stream(chance)

    def shown(self, drawn: Stream) -> bytes:
        return drawn.data

    def attack(self, chance: Chance, drawn: Stream) -> int:
        """One connection: it reads all its answers, or hangs up, or stays and never reads."""
        connection = self.broker.connect()
        behaviour = chance.choices(("reads", "hangs up", "stays"), (8, 1, 1))[0]
        if any(request.code == Request.HEART_BEAT for request in drawn.requests):
            behaviour = "reads"  # a client that is known and does not read would make others wait for what it is asked
        if behaviour == "reads":
            pieces = [drawn.data] if chance.random() < 0.5 else random_slices(drawn.data, chance.randrange(1 << 32))
            with connection:
                if drawn.data[0] in FIRST_BYTES:
                    talk = Talk(connection, drawn, pieces, chance)
                    talk.collect()
                    check_responses(drawn, talk.responses)
                    self.details.update(responses=len(talk.responses), lost=drawn.lost)
                else:
                    converse(connection, pieces)
                    self.details["other protocols"] += 1
        elif behaviour == "hangs up":
            send_some(connection, drawn.data)
            hang_up(connection)
        else:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so that the broker is soon stuck with answers
            send_some(connection, drawn.data)
            self.stay(chance, connection)
        self.details[behaviour] += 1
        return drawn.frames

    def check(self, chance: Chance) -> None:
        self._text.check(chance)
        self._remoting.check(chance)

    def settle(self) -> None:
        wait_until(lambda: self._text.connections() == 2, SETTLE_DEADLINE_S, "the broker has closed what was hung up")
        self._remoting.check_all()

    def run_within(self, frames: int, most_growth_kb: int = MAX_GROWTH_KB) -> None:
        """The same, and ``Violation`` when a turn of the broker's loop took long."""
        super().run_within(frames, most_growth_kb)
        longest_ms = round(1000 * Values(self.broker, self._secret).get("metaq_longest_turn_seconds"))
        self.details["longest_turn_ms"] = longest_ms
        if longest_ms > MOST_TURN_MS:
            raise Violation(f"a turn of the loop took {longest_ms} ms of the processor, more than {MOST_TURN_MS} ms")

    def close(self) -> None:
        super().close()
        self._text.close()
        self._remoting.close()


def run(seed: int, count: int) -> Result:
    """Send ``count`` frames; ``Violation`` when the broker breaks a promise."""
    with (
        tempfile.TemporaryDirectory() as folder,
        FreshBroker(Path(folder) / "data", *FLAGS) as broker,
        contextlib.closing(FrameAttack(broker, seed)) as attack,
    ):
        attack.run_within(count)
    return Result("frames", range(seed, seed + 1), attack.details["frames"], dict(attack.details))


if __name__ == "__main__":
    main(run, count=30_000)
