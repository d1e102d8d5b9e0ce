"""Garbage, mutated and truncated frames against a real broker.

Many connections, one after the other and some side by side, send what no client sends: random bytes, valid conversations with
bytes changed, lost or added, numbers at and beyond every limit, odd line ends, frames cut in the middle. They read all answers,
or none and hang up, or none and stay open. Meanwhile a control connection puts and gets.

What must hold: the process lives and prints no traceback; the control connection is served correctly all along; every command
gets exactly one well-formed reply, in order, with its opaque; memory in use goes down again.

``python -m tests.crash.garbage --seed 7 --count 300000`` runs it; a failure names the seed and the connection.
"""

import argparse
import contextlib
import errno
import random
import re
import select
import socket
import struct
import tempfile
import typing
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import metaq
from metaq.protocol.remoting.signature import Credentials
from metaq.protocol.text.codec import (
    TRANSACTION_TYPES,
    CommandReader,
    TextLimits,
    write_get,
    write_line,
    write_offset,
    write_put,
)
from metaq.protocol.text.commands import Command, Get, Invalid, Put, Quit, Stats, Transaction, Version
from metaq.protocol.text.messages import HEADER_SIZE_TEXT, decode_messages
from metaq.protocol.text.replies import MOVED, NOT_FOUND, OK, VALUE, Reply, ReplyReader
from tests.crash.command import Result
from tests.support.broker import SOCKET_TIMEOUT_S, BrokerProcess, wait_until
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
MAX_GROWTH_KB: Final = 10 * 1024
SETTLE_DEADLINE_S: Final = 60.0
WARM_UP_SHARE: Final = 10
"""One in so many frames is sent before memory is measured for the first time."""
LEECHES: Final = 20
CONTROL_EVERY: Final = 10

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

Chance = random.Random


class Violation(AssertionError):
    """The broker broke a promise; the text says how to see it again."""


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
    """Those that the broker looks at: what stands behind a lost stream or a quit is not counted."""
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


# -- connections ------------------------------------------------------------------------------------------------------


def converse(connection: socket.socket, pieces: list[bytes]) -> tuple[bytes, bool]:
    """Send everything, read meanwhile, and read to the end; what came, and whether the end was a reset."""
    connection.setblocking(False)
    poll = select.poll()
    poll.register(connection, select.POLLIN | select.POLLOUT)
    pending, received = list(reversed(pieces)), bytearray()
    reset = False
    while True:
        events = poll.poll(SOCKET_TIMEOUT_S * 1000)
        if not events:
            raise Violation(f"no answer within {SOCKET_TIMEOUT_S} s; {len(received)} bytes came")
        readable = events[0][1] & ~select.POLLOUT
        try:
            if readable:
                data = connection.recv(1 << 16)
                if not data:
                    return bytes(received), reset
                received += data
            elif pending:
                piece = pending.pop()
                sent = connection.send(piece)
                if sent < len(piece):
                    pending.append(piece[sent:])
            else:
                poll.modify(connection, select.POLLIN)
                connection.shutdown(socket.SHUT_WR)
        except OSError as error:
            if error.errno not in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN):
                raise
            if readable:
                return bytes(received), True
            reset = True  # the broker no longer listens; read what it said before
            poll.modify(connection, select.POLLIN)


def send_some(connection: socket.socket, data: bytes) -> None:
    """Send as much as goes without waiting, and ignore that the broker may have closed."""
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError, ConnectionResetError, BrokenPipeError):
        while data:
            data = data[connection.send(data) :]


def hang_up(connection: socket.socket) -> None:
    """Close with a reset, as a killed client does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def resident_kb(pid: int) -> dict[str, int]:
    """Resident memory of a process in kB: all of it (VmRSS), and what is its own (RssAnon)."""
    lines = [line.split() for line in Path(f"/proc/{pid}/status").read_text("ascii").splitlines()]
    return {name[:-1]: int(rest[0]) for name, *rest in lines if name in ("VmRSS:", "RssAnon:")}


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
        messages = list(decode_messages(got.body, self._position)) if got.code == VALUE else []
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


# -- the run ----------------------------------------------------------------------------------------------------------


class Attack:
    """One broker under garbage."""

    def __init__(self, broker: BrokerProcess, seed: int) -> None:
        self._broker = broker
        self._seed = seed
        self._pid = broker.pid
        self._control = Control(broker)
        self._leeches: list[socket.socket] = []
        self.details: Counter[str] = Counter()

    def run(self, frames: int) -> None:
        """Send so many frames."""
        end = self.details["frames"] + frames
        while self.details["frames"] < end:
            number = self.details["connections"]
            chance = Chance(f"{self._seed}/{number}")
            stream = draw_stream(chance)
            try:
                self._one(chance, stream)
                if number % CONTROL_EVERY == 0:
                    self._control.check(chance)
                    self.check_process()
            except (OSError, AssertionError) as error:
                shown = stream.data if len(stream.data) < 3000 else stream.data[:1500] + b" ... " + stream.data[-1500:]
                raise Violation(f"seed {self._seed}, connection {number}: {error}\nit said {shown!r}") from error
            self.details.update(frames=stream.frames, connections=1)

    def _one(self, chance: Chance, stream: Stream) -> None:
        """One connection: it reads all its answers, or hangs up, or stays and never reads."""
        connection = self._broker.connect()
        behaviour = chance.choices(("reads", "hangs up", "stays"), (8, 1, 1))[0]
        if behaviour == "reads":
            pieces = [stream.data] if chance.random() < 0.5 else random_slices(stream.data, chance.randrange(1 << 32))
            with connection:
                data, reset = converse(connection, pieces)
            self.details["replies"] += check_replies(stream.commands, data, reset=reset)
            self.details["resets"] += reset
        elif behaviour == "hangs up":
            send_some(connection, stream.data)
            hang_up(connection)
        else:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so that the broker is soon stuck with answers
            gets = b"".join(write_get(chance.choice(TOPICS[:3]), "g", 0, 0, 1 << 20, 1) for _ in range(50))
            send_some(connection, stream.data + chance.choice((b"", gets)))
            self._leeches.append(connection)
            if len(self._leeches) > LEECHES:
                hang_up(self._leeches.pop(chance.randrange(LEECHES)))
        self.details[behaviour] += 1

    def check_process(self) -> None:
        if not self._broker.running or self._broker.pid != self._pid:
            raise Violation(f"the broker is gone:\n{self._broker.stderr()}")
        if "Traceback" in self._broker.stderr():
            raise Violation(f"the broker printed a traceback:\n{self._broker.stderr()[-5000:]}")

    def memory_kb(self) -> dict[str, int]:
        """Resident memory when all other connections are closed."""
        for leech in self._leeches:
            hang_up(leech)
        self._leeches.clear()
        wait_until(lambda: self._control.connections() == 1, SETTLE_DEADLINE_S, "the broker has closed what was hung up")
        return resident_kb(self._pid)

    def close(self) -> None:
        for leech in self._leeches:
            leech.close()
        self._control.close()


def run(seed: int, count: int) -> Result:
    """Send ``count`` frames; ``Violation`` when the broker breaks a promise."""
    with (
        tempfile.TemporaryDirectory() as folder,
        BrokerProcess(Path(folder) / "data", *FLAGS) as broker,
        contextlib.closing(Attack(broker, seed)) as attack,
    ):
        attack.run(count // WARM_UP_SHARE)
        before = attack.memory_kb()
        attack.run(count - count // WARM_UP_SHARE)
        after = attack.memory_kb()
        attack.check_process()
    for name in before:
        attack.details[f"{name}_growth_kb"] = after[name] - before[name]
    if max(after[name] - before[name] for name in before) >= MAX_GROWTH_KB:
        raise Violation(f"seed {seed}: memory grew from {before} to {after} kB, more than {MAX_GROWTH_KB} kB")
    return Result("garbage", range(seed, seed + 1), attack.details["frames"], dict(attack.details))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=30_000)
    options = parser.parse_args()
    print(run(options.seed, options.count))


if __name__ == "__main__":
    main()
