"""Real ZooKeepers for tests, started by ``metaq zookeeper`` on ports of their own: one alone, or an ensemble of three."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kazoo.client import KazooClient

from tests.support.broker import wait_until
from tests.support.ports import free_ports

START_DEADLINE_S: Final = 120.0
STOP_DEADLINE_S: Final = 60.0
TICK_MS: Final = 200
"""Sessions of 0.4 s and longer."""
WITHOUT_SYNCS: Final = {"JAVA_TOOL_OPTIONS": "-Dzookeeper.forceSync=no"}
"""For Java: no power is cut here, and a disk that is slow for a moment is to end no session of 4 s."""
_READY: Final = re.compile(r"^metaq zookeeper ready listen=(\S+):(\d+) data=.* pid=(\d+)\n", re.MULTILINE)


class ZooKeeperProcess:
    """One ZooKeeper over the folder ``data``, from entering the ``with`` block until leaving it; restarts keep the port."""

    def __init__(self, data: Path, *flags: str, port: int | None = None) -> None:
        """``port`` 0 lets it take a free one itself, which others may have taken when it restarts."""
        self.data = data
        self.port = free_ports(1)[0] if port is None else port
        self._flags = flags
        self._output = data.with_name(f"{data.name}.stdout")
        self._log = data.with_name(f"{data.name}.stderr")
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return f"127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start, and wait until it serves."""
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        """Start without waiting: a member of an ensemble serves only with a quorum."""
        assert not self.running
        command = [sys.executable, "-m", "metaq", "zookeeper", "--data", str(self.data), "--tick-ms", str(TICK_MS)]
        command += ["--listen", self.address, *self._flags]
        with self._output.open("wb") as output, self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=log, env={**os.environ, **WITHOUT_SYNCS}
            )

    def wait_ready(self) -> None:
        """Wait for the line that says that it serves."""
        wait_until(lambda: self._read_ready_line() or not self.running, START_DEADLINE_S, f"ZooKeeper serves; see {self._log}")
        assert self._read_ready_line(), f"ZooKeeper ended when it should serve:\n{self._log.read_text()}"

    def _read_ready_line(self) -> bool:
        ready = _READY.search(self._output.read_text())
        if ready is not None:
            self.port = int(ready[2])
        return ready is not None

    @property
    def _running_process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def kill(self) -> None:
        """SIGKILL, and wait for the end; nothing when it does not run."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait()

    def terminate(self) -> int:
        """SIGTERM, and the exit code."""
        self._running_process.terminate()
        return self._running_process.wait(STOP_DEADLINE_S)

    def pause(self) -> None:
        """SIGSTOP: its connections stay open, and nothing answers."""
        os.kill(self._running_process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self._running_process.pid, signal.SIGCONT)

    def wipe(self) -> None:
        """Forget everything that is stored; it must not run."""
        assert not self.running
        shutil.rmtree(self.data / "version-2")

    def ask(self, word: str) -> str:
        """The answer to a four-letter word; empty when nobody listens."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as link:
                link.sendall(word.encode())
                answer = b""
                while data := link.recv(4096):
                    answer += data
                return answer.decode()
        except OSError:
            return ""

    @contextmanager
    def client(self, session_s: float = 10.0) -> Iterator[KazooClient]:
        """A connected client that is not ours, to look with; what is called by its ``retry`` waits out a restart."""
        retry = {"max_tries": -1, "max_delay": 0.5}
        client = KazooClient(self.address, timeout=session_s, connection_retry=dict(retry), command_retry=dict(retry))
        try:
            client.start(timeout=30)
            yield client
        finally:
            client.stop()
            client.close()


class Ensemble:
    """Three members that are one ZooKeeper."""

    def __init__(self, folder: Path) -> None:
        ports = free_ports(9)
        servers = ",".join(f"127.0.0.1:{peer}:{election}" for peer, election in zip(ports[3:6], ports[6:], strict=True))
        self.members = [
            ZooKeeperProcess(folder / f"zk{number}", "--ensemble", servers, "--member", str(number), port=port)
            for number, port in enumerate(ports[:3], 1)
        ]

    def __enter__(self) -> Self:
        for member in self.members:
            member.launch()
        for member in self.members:
            member.wait_ready()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for member in self.members:
            member.kill()

    @property
    def address(self) -> str:
        """All members, as clients are told."""
        return ",".join(member.address for member in self.members)

    def leader(self) -> ZooKeeperProcess:
        """The member that leads now, waited for."""
        found: list[ZooKeeperProcess] = []

        def look() -> bool:
            found[:] = [member for member in self.members if member.running and "Mode: leader" in member.ask("srvr")]
            return bool(found)

        wait_until(look, START_DEADLINE_S, "the ensemble has a leader")
        return found[0]
