"""A real broker process for tests, on a port that nobody else is given; and waits for conditions with a deadline."""

import re
import socket
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Final, Self

from tests.support.forked import start_module
from tests.support.ports import free_ports

START_DEADLINE_S: Final = 120.0
STOP_DEADLINE_S: Final = 60.0
SOCKET_TIMEOUT_S: Final = 30.0
SEGMENT_BYTES: Final = 32 * 1024 * 1024
"""Unless a test says otherwise: the usual 1 GiB, twice a broker, would soon fill a disk."""
_READY: Final = re.compile(
    r"^metaq (?:registry )?ready listen=(\S+):(\d+)(?: remoting=\S+)?(?: registry=(\S+:\d+))?"
    r"(?: replication=(\S+:\d+) role=\w+)? data=.* pid=\d+(?: http=(\S+:\d+))?(?: .*)?\n",
    re.MULTILINE,
)


class BrokerFailed(AssertionError):
    """The process did not start, or ended when it should not have; the text holds its exit code and standard error."""


def wait_until(condition: Callable[[], bool], deadline_s: float, what: str, pause_s: float = 0.005) -> None:
    """Return as soon as ``condition`` holds; ``AssertionError`` naming ``what`` when it does not within ``deadline_s``.

    It is looked at every ``pause_s``.
    """
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline_s} s: {what}")
        time.sleep(pause_s)


def _free_address() -> str:
    return f"127.0.0.1:{free_ports(1)[0]}"


class BrokerProcess:
    """``metaq serve`` over the folder ``data``, from entering the ``with`` block until leaving it.

    ``host``, ``port`` and ``pid`` are those of the running process, ``registry`` is HOST:PORT of its embedded registry,
    ``replication`` where slaves connect, ``http`` where its metrics are; empty without. Standard output and error go to files
    beside ``data``, of which ``log`` is the second; every start appends to them.
    """

    program: ClassVar[tuple[str, ...]] = ("metaq", "serve")
    """The module that is run, and its first arguments."""
    ignored_disk: ClassVar[tuple[str, ...]] = ("--ample-free-bytes", "0")
    """The flags because of which no test depends on how full the disk of this machine is."""
    fresh: ClassVar[bool] = False
    """Whether its interpreter starts from nothing, as a user's does, and takes 0.4 s of processor time longer."""

    def __init__(self, data: Path, *flags: str, durability: str = "memory", listen: str = "") -> None:
        """Without ``listen`` each start takes a free port, and nobody is given it while the broker is down."""
        self.data = data
        self.flags = flags
        self.durability = durability
        self.host = ""
        self.port = 0
        self.registry = ""
        self.replication = ""
        self.http = ""
        self.pid = 0
        self.log = data.with_name(f"{data.name}.stderr")
        self._listen = listen
        self._registry_listen = ""
        self._output = data.with_name(f"{data.name}.stdout")
        self._output_before = 0
        self._process: BaseProcess | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.exitcode is None

    def start(self) -> None:
        """Start the process and wait until it serves."""
        self.launch()
        try:
            self.wait_ready()
        except BaseException:
            self.kill()
            raise

    def own_flags(self) -> list[str]:
        """Beside where its data is and where it listens. It puts nothing into the log that a test has not asked for."""
        registry = self._registry_listen or _free_address()
        flags = ["--remoting-listen", "none", "--registry-listen", registry, "--http-listen", "127.0.0.1:0"]
        flags += ["--offset-export-interval-ms", "0"]
        flags += self.ignored_disk
        if self.durability == "disk":
            flags += ["--sync-timeout-ms", "60000"]  # a disk that others keep busy fails no test
        return [*flags, "--segment-bytes", str(SEGMENT_BYTES), "--durability", self.durability]

    def launch(self) -> None:
        """Start the process without waiting: it may be killed while it recovers."""
        assert not self.running, f"process {self.pid} still runs"
        listen = self._listen or _free_address()
        command = [*self.program, "--data", str(self.data), "--listen", listen, *self.own_flags(), *self.flags]
        self._output_before = self._output.stat().st_size if self._output.exists() else 0
        self._process = start_module(command, self._output, self.log, fresh=self.fresh)
        assert self._process.pid is not None
        self.pid = self._process.pid

    def wait_ready(self) -> None:
        """Wait for the line that says where it listens."""
        process = self._started()
        ended = False

        def ready_or_ended() -> bool:
            nonlocal ended
            # asked before the line is looked for: what a process printed before its end is then complete
            ended = process.exitcode is not None
            return self._read_ready_line() or ended

        wait_until(ready_or_ended, START_DEADLINE_S, f"process {self.pid} is ready; see {self.log}")
        if ended:
            raise BrokerFailed(f"the broker ended with {process.exitcode} when it should serve:\n{self.stderr()}")

    def _read_ready_line(self) -> bool:
        ready = _READY.search(self._output.read_bytes()[self._output_before :].decode())
        if ready is not None:
            self.host, self.port = ready[1].strip("[]"), int(ready[2])
            self.registry, self.replication, self.http = ready[3] or "", ready[4] or "", ready[5] or ""
        return ready is not None

    def _started(self) -> BaseProcess:
        assert self._process is not None, "the broker was never started"
        return self._process

    def kill(self) -> None:
        """SIGKILL, and wait for the end; nothing when it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.join()

    def terminate(self) -> int:
        """SIGTERM, and the exit code; a process that does not end is killed and reported."""
        process = self._started()
        process.terminate()
        process.join(STOP_DEADLINE_S)
        if process.exitcode is None:
            self.kill()
            raise BrokerFailed(f"no end within {STOP_DEADLINE_S} s of SIGTERM:\n{self.stderr()}")
        return process.exitcode

    def restart(self, *, same_port: bool = False) -> None:
        """Start again over the same data, after a SIGKILL if it still runs."""
        self.kill()
        if same_port:
            self._listen = self.address
            self._registry_listen = self.registry
        self.start()

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return f"{self.host}:{self.port}"

    def connect(self) -> socket.socket:
        """A new connection, whose operations give up after ``SOCKET_TIMEOUT_S``."""
        return socket.create_connection((self.host, self.port), timeout=SOCKET_TIMEOUT_S)

    def stderr(self) -> str:
        """Return what the broker has written to standard error, over all starts."""
        return self.log.read_text("utf-8", errors="replace") if self.log.exists() else ""


class FreshBroker(BrokerProcess):
    """A broker whose memory is measured: a fork is counted less, until it has touched what it shares with its parent."""

    fresh = True


class RegistryProcess(BrokerProcess):
    """``metaq registry`` over the folder ``data``."""

    program = ("metaq", "registry")

    def own_flags(self) -> list[str]:
        return ["--http-listen", "127.0.0.1:0"]
