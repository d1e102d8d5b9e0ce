"""The brokers that are measured: how each is started on loopback in a folder of its own, and ended again."""

import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from benchmarks.figures import MeasurementError
from benchmarks.programs import HERE, build

START_SECONDS = 60
STOP_SECONDS = 30
REPLY_SECONDS = 10
OTHER_PORTS = ("registry", "replication")
SEARCH_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


class Level(Enum):
    """An acknowledged put's durability: MEMORY survives a killed process, DISK a power cut, REPLICA the loss of the machine."""

    MEMORY = "memory"
    DISK = "disk"
    REPLICA = "replica"
    DISK_REPLICA = "disk+replica"


@dataclass
class Server:
    """A running server. `started_seconds` is the time from fork to its ready line or first answer.

    `registry_port` and `replication_port` are 0 where nothing listens for that.
    """

    name: str
    process: subprocess.Popen[bytes]
    port: int
    started_seconds: float
    registry_port: int = 0
    replication_port: int = 0

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """SIGKILL, as a crash would end it."""
        self.process.kill()
        self.process.wait(STOP_SECONDS)
        self._close()

    def stop(self) -> None:
        """SIGTERM and, if that does not end it in time, SIGKILL."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(STOP_SECONDS)
        self._close()

    def _close(self) -> None:
        if self.process.stdout:
            self.process.stdout.close()


@dataclass(frozen=True)
class System:
    """One way to run one server. `command` gets its folder and a free port; `ping` is a request, `pong` its answer.

    `puts` and `gets` name the protocols that the load generator speaks to it; empty where it has none.
    A server with a `ready_line` (a pattern with the group `port`, on standard output) picks its port itself; the group
    `registry` and `replication` may name other ports of it.
    """

    name: str
    level: Level
    puts: str
    gets: str
    program: Path | None
    hint: str
    command: Callable[[Path, int], Sequence[str]]
    ping: bytes
    pong: bytes
    ready_line: str | None = None
    set_up: bytes = b""
    set_up_reply: bytes = b""
    version_option: str | None = field(default=None, compare=False)

    @property
    def available(self) -> bool:
        return self.program is not None

    def start(self, folder: Path, extra: Sequence[str] = ()) -> Server:
        """Start it on the folder (made when missing) and return once it answers.

        Raises MeasurementError with the end of its log when it does not within START_SECONDS.
        """
        folder.mkdir(exist_ok=True)
        port = 0 if self.ready_line else free_port()
        log = folder.parent / f"{folder.name}.log"
        begun = time.monotonic()
        with log.open("ab") as stderr:
            process = subprocess.Popen(
                [str(self.program), *self.command(folder, port), *extra],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if self.ready_line else stderr,
                stderr=stderr,
                cwd=folder,
            )
        server = Server(self.name, process, port, 0.0)
        try:
            if self.ready_line:
                ports = _read_ready_line(process, self.ready_line, begun + START_SECONDS)
                server.port = int(ports["port"] or 0)
                server.registry_port, server.replication_port = (int(ports.get(name) or 0) for name in OTHER_PORTS)
            else:
                _await_answer(self, server, begun + START_SECONDS)
            server.started_seconds = time.monotonic() - begun
            if self.set_up:
                ask(server.port, self.set_up, self.set_up_reply)
        except BaseException as error:
            server.kill()
            if isinstance(error, MeasurementError):
                tail = log.read_text(errors="replace")[-2000:]
                raise MeasurementError(f"{self.name} did not start: {error}\n{tail}") from error
            raise
        return server

    @contextmanager
    def running(self, folder: Path, extra: Sequence[str] = ()) -> Iterator[Server]:
        server = self.start(folder, extra)
        try:
            yield server
        finally:
            server.stop()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def ask(port: int, request: bytes, wanted: bytes, deadline: float | None = None) -> None:
    """Send a request on a connection of its own and read until the wanted bytes came."""
    limit = deadline if deadline is not None else time.monotonic() + REPLY_SECONDS
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=REPLY_SECONDS) as connection:
        connection.sendall(request)
        while wanted not in received:
            left = limit - time.monotonic()
            if left <= 0:
                raise MeasurementError(f"{wanted!r} did not come in time; received: {received[:500]!r}")
            connection.settimeout(left)
            try:
                part = connection.recv(65536)
            except TimeoutError:
                continue
            if not part:
                raise MeasurementError(f"connection closed after {received[:500]!r}, {wanted!r} was expected")
            received += part


def _await_answer(system: System, server: Server, deadline: float) -> None:
    while True:
        if server.process.poll() is not None:
            raise MeasurementError(f"it ended with {server.process.returncode}")
        if time.monotonic() > deadline:
            raise MeasurementError(f"no answer within {START_SECONDS} s")
        try:
            ask(server.port, system.ping, system.pong, min(deadline, time.monotonic() + 1))
        except (ConnectionError, MeasurementError):
            time.sleep(0.01)  # not listening yet, or listening and not ready (Redis says LOADING)
        else:
            return


def _read_ready_line(process: subprocess.Popen[bytes], pattern: str, deadline: float) -> dict[str, str | None]:
    assert process.stdout is not None
    received = b""
    while b"\n" not in received:
        readable, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        part = os.read(process.stdout.fileno(), 4096) if readable else b""
        if not part:
            reason = "it closed its output" if readable else f"no ready line within {START_SECONDS} s"
            raise MeasurementError(f"{reason}; it said {received!r}")
        received += part
    found = re.search(pattern, received.decode(errors="replace"))
    if found is None:
        raise MeasurementError(f"its first line is not the ready line: {received!r}")
    return found.groupdict()


def _find(name: str) -> Path | None:
    path = shutil.which(name, path=SEARCH_PATH)
    return Path(path) if path else None


def metaq(level: Level, settings: Sequence[str] = ()) -> System:
    """Our broker from this checkout, every setting at its default but the level, and free ports so that several can run."""
    program = Path(sys.executable).with_name("metaq")

    def command(folder: Path, port: int) -> list[str]:
        place = ["--data", str(folder / "data"), "--listen", f"127.0.0.1:{port}", "--remoting-listen", "none"]
        place += ["--ample-free-bytes", "0"]  # a disk that is rather full measures the same
        return ["serve", *place, "--registry-listen", "127.0.0.1:0", "--durability", level.value, *settings]

    return System(
        name=f"metaq {level.value}",
        level=level,
        puts="metaq-put",
        gets="metaq-get",
        program=program if program.exists() else None,
        hint="pip install -e . in the environment that runs the benchmarks",
        command=command,
        ping=b"version 1\r\n",
        pong=b"result 200",
        ready_line=r"^metaq ready listen=\S+:(?P<port>\d+) registry=\S+:(?P<registry>\d+) "
        r"(?:replication=\S+:(?P<replication>\d+) )?",
    )


def redis(appendfsync: str, level: Level) -> System:
    """Redis Streams. The rewrite of the append-only file is off: it would run in the middle of a measurement."""

    def command(folder: Path, port: int) -> list[str]:
        place = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
        return [*place, "--save", "", "--appendonly", "yes", "--appendfsync", appendfsync, *NO_REWRITE]

    return System(
        name=f"redis {appendfsync}",
        level=level,
        puts="redis-xadd",
        gets="redis-xrange",
        program=_find("redis-server"),
        hint="apt-get install redis-server",
        command=command,
        ping=b"PING\r\n",
        pong=b"+PONG\r\n",
        version_option="--version",
    )


NO_REWRITE = ["--auto-aof-rewrite-percentage", "0"]


def beanstalkd(sync: bool) -> System:
    """Beanstalkd with its binlog: synced at every write, or never."""

    def command(folder: Path, port: int) -> list[str]:
        place = ["-l", "127.0.0.1", "-p", str(port), "-b", str(folder)]
        return [*place, "-f0" if sync else "-F", "-z", str(1 << 20)]

    return System(
        name="beanstalkd sync" if sync else "beanstalkd no sync",
        level=Level.DISK if sync else Level.MEMORY,
        puts="beanstalkd-put",
        gets="beanstalkd-peek",
        program=_find("beanstalkd"),
        hint="apt-get install beanstalkd",
        command=command,
        ping=b"list-tube-used\r\n",
        pong=b"USING default\r\n",
        version_option="-v",
    )


def nats() -> System:
    """NATS JetStream with file storage and its default sync interval (two minutes), one replica."""
    stream = {
        "name": "bench",
        "subjects": ["bench"],
        "storage": "file",
        "retention": "limits",
        "discard": "old",
        "max_consumers": -1,
        "max_msgs": -1,
        "max_bytes": -1,
        "max_age": 0,
        "max_msg_size": -1,
        "num_replicas": 1,
    }
    body = json.dumps(stream).encode()
    hello = b'CONNECT {"verbose":false,"pedantic":false}\r\n'
    create = b"SUB made 1\r\nPUB $JS.API.STREAM.CREATE.bench made %d\r\n%b\r\n" % (len(body), body)

    def command(folder: Path, port: int) -> list[str]:
        return ["-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(folder)]

    return System(
        name="nats jetstream",
        level=Level.MEMORY,
        puts="nats-publish",
        gets="nats-pull",
        program=_find("nats-server"),
        hint="apt-get install nats-server",
        command=command,
        ping=hello + b"PING\r\n",
        pong=b"PONG\r\n",
        set_up=hello + create,
        set_up_reply=b'"created":',
        version_option="--version",
    )


def nullbroker(given: Path | None) -> System:
    """The least a text put can cost on this machine: a C program PORT FOLDER, or its source."""
    program = build(given, libraries=["z"]) if given is not None and given.suffix == ".c" else given
    return System(
        name="nullbroker",
        level=Level.MEMORY,
        puts="metaq-put",
        gets="",
        program=program,
        hint="--nullbroker FILE or NULLBROKER names it",
        command=lambda folder, port: [str(port), str(folder)],
        ping=b"put ready 0 0 0 1\r\n",
        pong=b"result 200",
    )


def sendfile_loop(records: Path) -> System:
    """A C loop that answers text gets with sendfile out of one file of records."""
    return System(
        name="sendfile loop",
        level=Level.MEMORY,
        puts="",
        gets="metaq-get",
        program=build(HERE / "limits.c"),
        hint="gcc",
        command=lambda _folder, _port: ["sendfile", str(records)],
        ping=b"",
        pong=b"",
        ready_line=r"^ready port=(?P<port>\d+)$",
    )


def all_systems(null: Path | None) -> list[System]:
    """Every server there is to measure, ours first at each level."""
    return [
        metaq(Level.MEMORY),
        nullbroker(null),
        nats(),
        redis("everysec", Level.MEMORY),
        beanstalkd(sync=False),
        metaq(Level.DISK),
        redis("always", Level.DISK),
        beanstalkd(sync=True),
    ]
