"""What every attack on a broker with garbage shares: connections drawn from a seed, some of which stay, and what must hold.

A subclass draws what a connection says and has it said. Each connection's chances come from the seed and the connection's
number, so a violation names both. What must hold after them: the process lives and has printed no traceback, and memory in use
has gone down again.
"""

import argparse
import contextlib
import errno
import random
import select
import socket
import struct
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, TypeVar

from tests.crash.command import Result, Violation
from tests.support.broker import SOCKET_TIMEOUT_S, BrokerProcess

MAX_GROWTH_KB: Final = 10 * 1024
SETTLE_DEADLINE_S: Final = 60.0
WARM_UP_SHARE: Final = 10
"""One in so many frames is sent before memory is measured for the first time."""
MOST_STAYING: Final = 20
"""Connections that stay and never read; one more, and one of them hangs up."""
SHOWN_BYTES: Final = 1500
"""Of what a connection said, from its beginning and from its end."""

Chance = random.Random
Drawn = TypeVar("Drawn")


class Attack(ABC, Generic[Drawn]):
    """One broker under attack. ``details`` counts what was done: ``frames``, ``connections``, and how they behaved."""

    check_every = 10
    """Connections between two looks at what must hold all the time."""

    def __init__(self, broker: BrokerProcess, seed: int) -> None:
        self.broker = broker
        self.details: Counter[str] = Counter()
        self._seed = seed
        self._pid = broker.pid
        self._staying: list[socket.socket] = []

    @abstractmethod
    def draw(self, chance: Chance) -> Drawn:
        """Return what the next connection says."""

    @abstractmethod
    def shown(self, drawn: Drawn) -> bytes:
        """Return the bytes of what was drawn."""

    @abstractmethod
    def attack(self, chance: Chance, drawn: Drawn) -> int:
        """Be one connection that says it, judge the answers, and return how many frames it was."""

    @abstractmethod
    def check(self, chance: Chance) -> None:
        """Raise ``Violation`` when others are not served as they should be."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until the broker has closed all connections of the attack."""

    def run(self, frames: int) -> None:
        """Send so many frames; ``Violation`` with the seed, the connection and what it said."""
        end = self.details["frames"] + frames
        while self.details["frames"] < end:
            number = self.details["connections"]
            chance = Chance(f"{self._seed}/{number}")
            drawn = self.draw(chance)
            try:
                sent = self.attack(chance, drawn)
                if number % self.check_every == 0:
                    self.check(chance)
                    self.check_process()
            except (OSError, AssertionError) as error:
                said = self.shown(drawn)
                if len(said) > 2 * SHOWN_BYTES:
                    said = said[:SHOWN_BYTES] + b" ... " + said[-SHOWN_BYTES:]
                raise Violation(f"seed {self._seed}, connection {number}: {error}\nit said {said!r}") from error
            self.details.update(frames=sent, connections=1)

    def run_within(self, frames: int, most_growth_kb: int = MAX_GROWTH_KB) -> None:
        """Send so many frames; ``Violation`` when more memory is kept after them than after the first tenth."""
        self.run(frames // WARM_UP_SHARE)
        before = self._settled_kb()
        self.run(frames - frames // WARM_UP_SHARE)
        after = self._settled_kb()
        self.check_process()
        for name in before:
            self.details[f"{name}_growth_kb"] = after[name] - before[name]
        if max(after[name] - before[name] for name in before) >= most_growth_kb:
            raise Violation(f"seed {self._seed}: memory grew from {before} to {after} kB, more than {most_growth_kb} kB")

    def stay(self, chance: Chance, connection: socket.socket) -> None:
        """Leave a connection open that reads nothing; one of too many hangs up."""
        self._staying.append(connection)
        if len(self._staying) > MOST_STAYING:
            hang_up(self._staying.pop(chance.randrange(MOST_STAYING)))

    def check_process(self) -> None:
        if not self.broker.running or self.broker.pid != self._pid:
            raise Violation(f"the broker is gone:\n{self.broker.stderr()}")
        if "Traceback" in self.broker.stderr():
            raise Violation(f"the broker printed a traceback:\n{self.broker.stderr()[-5000:]}")

    def _settled_kb(self) -> dict[str, int]:
        """Return the resident memory when all connections of the attack are closed, without the mapped files of the store.

        Those pages hold what was stored meanwhile, and the kernel takes them back when it needs them.
        """
        for connection in self._staying:
            hang_up(connection)
        self._staying.clear()
        self.settle()
        found = resident_kb(self._pid)
        found["VmRSS"] -= mapped_kb(self._pid, self.broker.data)
        return found

    def close(self) -> None:
        for connection in self._staying:
            connection.close()


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
    """Return the resident memory of a process in kB: all of it (VmRSS), and what is its own (RssAnon)."""
    lines = [line.split() for line in Path(f"/proc/{pid}/status").read_text("ascii").splitlines()]
    return {name[:-1]: int(rest[0]) for name, *rest in lines if name in ("VmRSS:", "RssAnon:")}


def mapped_kb(pid: int, folder: Path) -> int:
    """Return how much of a process's resident memory is pages of files in a folder, in kB."""
    total, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text("utf-8", errors="replace").splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):  # the first line of a mapping, which ends with the file's path
            inside = f" {folder}/" in line
        elif inside and name == "Rss:":
            total += int(rest.split()[0])
    return total


def main(run: Callable[[int, int], Result], count: int) -> None:
    """``--seed N --count M`` runs M of the attack N; ``count`` is M where none is given."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=count)
    options = parser.parse_args()
    print(run(options.seed, options.count))
