"""Garbage, mutated and truncated frames against a real broker.

Many connections, one after the other and some side by side, send what no client sends: random bytes, valid conversations with
bytes changed, lost or added, numbers at and beyond every limit, odd line ends, frames cut in the middle. They read all answers,
or none and hang up, or none and stay open. Meanwhile a control connection puts and gets.

What must hold: the process lives and prints no traceback; the control connection is served correctly all along; every command
gets exactly one well-formed reply, in order, with its opaque; memory in use goes down again.

``python -m tests.crash.garbage --seed 7 --count 300000`` runs it; a failure names the seed and the connection.
"""

import contextlib
import re
import socket
import tempfile
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import metaq
from metaq.protocol.remoting.signature import Credentials
from metaq.protocol.text.codec import CommandReader, TextLimits
from metaq.protocol.text.commands import Command, Get, Invalid, Put, Quit, Stats, Transaction, Version
from metaq.protocol.text.lines import TRANSACTION_TYPES
from metaq.protocol.text.messages import HEADER_SIZE_TEXT, decode_text_messages
from metaq.protocol.text.replies import MOVED, NOT_FOUND, OK, VALUE, Reply
from metaq.protocol.text.writing import write_get, write_line, write_offset, write_put
from tests.crash.attack import SETTLE_DEADLINE_S, Attack, Chance, converse, hang_up, main, send_some
from tests.crash.command import Result, Violation
from tests.support.broker import BrokerProcess, FreshBroker, wait_until
from tests.support.talk import ReplyReader
from tests.support.wire import random_slices
from tests.wire.corpus import read_corpus

LIMITS: Final = TextLimits(max_body_bytes=4096)
# Limits that garbage meets often, holds that end soon, and few topics, which are no leak but take memory.
FLAGS: Final = (
    f"--max-body-bytes={LIMITS.max_body_bytes}",
    "--max-transfer-bytes=16384",
    "--max-unsent-bytes=65536",
    "--max-topics=20",
    "--max-hold-ms=3",
    f"--segment-bytes={64 << 20}",
)
TOPICS: Final = ["garbage-a", "garbage-b", "garbage-c", "t", "no topic", "", "x" * 200]
LIMIT_NUMBERS: Final = [
    str(sign * (1 << bits) + more) for bits in (15, 31, 32, 63, 64, 200) for sign in (1, -1) for more in (-1, 0, 1)
]
NUMBERS: Final = ["", "-", "+", "0", "-0", "+1", "-1", "00007", "1_0", "1e3", "0x10", "1.0", "²", *LIMIT_NUMBERS]
KINDS_OF_STEPS: Final = sorted(TRANSACTION_TYPES)
LINE_ENDS: Final = [b"\n", b"\r", b"\r\r\n", b"\n\r", b"\r\n\r\n", b" \r\n", b"\t\r\n", b"\0\r\n", b""]
REPLY_LINE: Final = re.compile(rb"(?:result (?:200|301|400|403|404|500|503)|value) \d+ [+-]?\d+")

CORPUS: Final = [
    case.data
    for case in read_corpus(
        Path(__file__).parents[1] / "wire" / "text", {kind.__name__: kind for kind in typing.get_args(Command)}
    )
    if len(case.data) < 2000
]

# -- frames -----------------------------------------------------------------------------------------------------------


def valid(chance: Chance) -> bytes:
    """A frame that a client might send."""
    topic, partition, opaque = chance.choice(TOPICS), chance.choice((0, 0, 0, 1, -1)), chance.randrange(-100, 100)
    body = chance.choice((b"", b"hello", b"\r\nquit\r\n", b"\0\0\0\5colorhi", chance.randbytes(chance.randrange(60))))
    position = chance.choice((0, 0, 25, 1 << 20, (1 << 63) - 1))
    key, kind = chance.choice(("null", "TX:S1:1", "XID:100:0a0b:0c0d:m")), chance.choice(KINDS_OF_STEPS)
    match chance.randrange(12):
        case 0 | 1 | 2:
            return write_put(topic, partition, chance.choice((0, 0, 1)), body, opaque, old=chance.random() < 0.5)
        case 3:
            return write_put(topic, partition, 0, body, opaque, transaction=key)
        case 4 | 5:
            return write_get(
                topic, "g", partition, position, chance.choice((0, 1, 100, 1 << 20)), opaque, chance.choice((0, 2))
            )
        case 6:
            return write_offset(topic, "g", partition, position, opaque)
        case 7:
            return write_line("stats", chance.choice(("", "topics", "offsets", "realtime", "help", "config", topic)), opaque)
        case 8:
            return write_line("transaction", key, "S1", kind, opaque)
        case 9:
            return write_line("sync", topic, partition, len(body), 0, 7, opaque) + body
        case 10:
            return write_line("create", topic, chance.choice((1, 2, 99999)), opaque)
        case _:
            return chance.choice(
                (write_line("version", opaque), write_line("help", opaque), write_line("auth", "a", "b", opaque))
            )


def recorded(chance: Chance) -> bytes:
    """A whole stream of the wire corpus, or a run of valid frames."""
    if chance.random() < 0.5:
        return chance.choice(CORPUS)
    return b"".join(valid(chance) for _ in range(chance.randrange(1, 6)))


def mutated(chance: Chance) -> bytes:
    """A recording with a few bytes flipped, lost, added or doubled."""
    data = bytearray(recorded(chance))
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(4):
            case 0 if at < len(data):
                data[at] ^= 1 << chance.randrange(8)
            case 1:
                del data[at : at + chance.randrange(1, 8)]
            case 2:
                data[at:at] = chance.choice((b" ", b"\r\n", b"-", b"\0", chance.randbytes(4)))
            case _:
                data[at:at] = data[at : at + 20]
    return bytes(data)


def odd_numbers(chance: Chance) -> bytes:
    """A valid frame with one of its numbers replaced."""
    line, end, body = valid(chance).partition(b"\r\n")
    tokens = line.decode().split(" ")
    numbers = [place for place, token in enumerate(tokens) if token.removeprefix("-").isdecimal()]
    tokens[chance.choice(numbers)] = chance.choice(NUMBERS)
    return " ".join(tokens).encode("latin-1") + end + body


def odd_line_ends(chance: Chance) -> bytes:
    """A valid frame whose line ends otherwise."""
    return valid(chance).replace(b"\r\n", chance.choice(LINE_ENDS), 1)


def truncated(chance: Chance) -> bytes:
    """The beginning of a valid frame; what follows on the connection is taken for the rest."""
    frame = valid(chance)
    return frame[: chance.randrange(len(frame))]


def noise(chance: Chance) -> bytes:
    """Random bytes, printable or not, with or without a line end; now and then more than a line may hold."""
    size = 5000 if chance.random() < 0.02 else chance.randrange(1, 200)
    data = chance.randbytes(size) if chance.random() < 0.5 else bytes(chance.choices(b"putgeoffs 019-\r\n", k=size))
    return data + chance.choice((b"", b"\r\n"))


KINDS: Final[list[Callable[[Chance], bytes]]] = [valid, mutated, odd_numbers, odd_line_ends, truncated, noise]


class Stream(NamedTuple):
    """The bytes that one connection sends, and what the broker must make of them."""

    data: bytes
    frames: int
    """Those that the broker looks at: what follows a lost stream or a quit is not counted."""
    commands: list[Command]
    """What the broker must make of it, up to where it stops listening."""


OPENING: Final = write_line("version", 1)
"""Says that a connection speaks the text protocol: garbage as the first byte would only be turned away."""


def draw_stream(chance: Chance) -> Stream:
    """Frames of one kind or of all, until there are enough or the broker no longer listens."""
    kinds = KINDS if chance.random() < 0.3 else [chance.choice(KINDS), valid]
    reader = CommandReader(LIMITS)
    data, commands = OPENING, reader.receive(OPENING)
    frames = silent = 0
    wanted = chance.choice((1, 5, 30, 30, 30, 300))  # the last one is the flood
    while frames < wanted and silent < 5:
        frame = chance.choice(kinds)(chance) or b" "
        data += frame
        frames += 1
        found = reader.receive(frame)
        silent = 0 if found else silent + 1
        commands += found
        if any(map(is_last, found)):
            break
    return Stream(data, frames, commands)


def is_last(command: Command) -> bool:
    """Return whether the broker closes the connection after this command."""
    return isinstance(command, Quit) or (isinstance(command, Invalid) and command.error.closes_connection)


# -- replies ----------------------------------------------------------------------------------------------------------


def read_replies(data: bytes, *, may_be_cut: bool) -> list[Reply]:
    """The replies in ``data``; ``Violation`` when a line is not exactly as the protocol has it."""
    reader = ReplyReader()
    replies = []
    at = 0
    while at < len(data):
        line, end, _ = data[at : at + 200].partition(b"\r\n")
        if end and not REPLY_LINE.fullmatch(line):
            raise Violation(f"a reply begins with {line!r}")
        stop = at + len(line) + 2 + int(line.split(b" ")[-2]) if end else len(data) + 1
        if stop > len(data):
            if may_be_cut:
                break
            raise Violation(f"the last reply is cut: {line!r} and {len(data) - at - len(line)} bytes")
        replies += reader.receive(data[at:stop])
        at = stop
    return replies


def may_answer(reply: Reply, command: Command) -> bool:
    """Return whether the reply fits the command: opaque, code and, where it is known, the body."""
    match command:
        case Quit():
            return False
        case Invalid():
            fits = reply.code == command.error.status and reply.body == str(command.error).encode()
        case Version():
            fits = reply.code == OK and reply.body == metaq.__version__.encode()
        case Get():
            fits = reply.code != OK and (reply.code != VALUE or reply.body != b"")
        case Put():
            fits = reply.code not in (VALUE, MOVED, NOT_FOUND)
        case _:
            fits = reply.code != VALUE
    opaque = int(command.opaque)
    if isinstance(command, Stats) and command.item_only and command.item.removeprefix("-").isdecimal():
        return fits and reply.opaque in (opaque, int(command.item))  # it is an opaque when no topic has that name
    return fits and reply.opaque == opaque


def check_replies(commands: list[Command], data: bytes, *, reset: bool) -> int:
    """Compare what came with what is due; return the number of replies.

    ``reset`` says how the connection ended: a broker that closes on unread bytes takes the last replies with it.
    """
    replies = read_replies(data, may_be_cut=reset)
    due = []
    for command in commands:
        if not isinstance(command, Quit) and not (isinstance(command, Transaction) and command.type == "END"):
            due.append(command)
        if is_last(command):
            break
    if len(replies) != len(due) and not (reset and len(replies) < len(due)):
        raise Violation(f"{len(due)} replies are due, {len(replies)} came, the last ones {replies[-3:]}")
    for command, reply in zip(due, replies, strict=False):
        if not may_answer(reply, command):
            raise Violation(f"{command} was answered with {reply}")
    return len(replies)


# -- the run ----------------------------------------------------------------------------------------------------------


class Control:
    """A well-behaved client that notices at once when it is not served as it should be."""

    def __init__(self, broker: BrokerProcess, who: Credentials | None = None) -> None:
        self._connection = broker.connect()
        self._reader = ReplyReader()
        self._position = 0
        self._opaque = 0
        if who is not None and self.ask(write_line("auth", who.name, who.secret, 0)).code != OK:
            raise Violation(f"the control connection cannot log in as {who.name}")

    def ask(self, frame: bytes) -> Reply:
        self._connection.sendall(frame)
        replies: list[Reply] = []
        while not replies:
            data = self._connection.recv(1 << 16)
            if not data:
                raise Violation("the control connection was closed")
            replies = self._reader.receive(data)
        if len(replies) != 1 or replies[0].opaque != self._opaque:
            raise Violation(f"the control connection got {replies} instead of a reply to {self._opaque}")
        return replies[0]

    def check(self, chance: Chance) -> None:
        """Put a message and get it back."""
        self._opaque += 1
        body = b"\r\nquit\r\n" + chance.randbytes(40)
        put = self.ask(write_put("control", 0, 0, body, self._opaque))
        got = self.ask(write_get("control", "g", 0, self._position, 1 << 20, self._opaque))
        messages = list(decode_text_messages(got.body, self._position)) if got.code == VALUE else []
        expected = [(body, b"%d 0 %d" % (message.id, self._position)) for message in messages[:1]]
        if (put.code, [(message.body, put.body) for message in messages]) != (OK, expected) or not messages:
            raise Violation(f"the control connection put {body!r}, was told {put}, and got {got}")
        self._position += HEADER_SIZE_TEXT + len(body)

    def connections(self) -> int:
        """Open connections, this one included."""
        self._opaque += 1
        text = self.ask(write_line("stats", "", self._opaque)).body.decode()
        return int(dict(line.split(" ", 1) for line in text.splitlines() if " " in line)["curr_connections"])

    def close(self) -> None:
        self._connection.close()


class GarbageAttack(Attack[Stream]):
    """A broker that is sent text, valid and not. A control connection puts and gets all along."""

    def __init__(self, broker: BrokerProcess, seed: int) -> None:
        super().__init__(broker, seed)
        self._control = Control(broker)

    def draw(self, chance: Chance) -> Stream:
        return draw_stream(chance)

    def shown(self, drawn: Stream) -> bytes:
        return drawn.data

    def attack(self, chance: Chance, drawn: Stream) -> int:
        """One connection: it reads all its answers, or hangs up, or stays and never reads."""
        connection = self.broker.connect()
        behaviour = chance.choices(("reads", "hangs up", "stays"), (8, 1, 1))[0]
        if behaviour == "reads":
            pieces = [drawn.data] if chance.random() < 0.5 else random_slices(drawn.data, chance.randrange(1 << 32))
            with connection:
                data, reset = converse(connection, pieces)
            self.details["replies"] += check_replies(drawn.commands, data, reset=reset)
            self.details["resets"] += reset
        elif behaviour == "hangs up":
            send_some(connection, drawn.data)
            hang_up(connection)
        else:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so that the broker is soon stuck with answers
            gets = b"".join(write_get(chance.choice(TOPICS[:3]), "g", 0, 0, 1 << 20, 1) for _ in range(50))
            send_some(connection, drawn.data + chance.choice((b"", gets)))
            self.stay(chance, connection)
        self.details[behaviour] += 1
        return drawn.frames

    def check(self, chance: Chance) -> None:
        self._control.check(chance)

    def settle(self) -> None:
        wait_until(lambda: self._control.connections() == 1, SETTLE_DEADLINE_S, "the broker has closed what was hung up")

    def close(self) -> None:
        super().close()
        self._control.close()


def run(seed: int, count: int) -> Result:
    """Send ``count`` frames; ``Violation`` when the broker breaks a promise."""
    with (
        tempfile.TemporaryDirectory() as folder,
        FreshBroker(Path(folder) / "data", *FLAGS) as broker,
        contextlib.closing(GarbageAttack(broker, seed)) as attack,
    ):
        attack.run_within(count)
    return Result("garbage", range(seed, seed + 1), attack.details["frames"], dict(attack.details))


if __name__ == "__main__":
    main(run, count=30_000)
