"""A PostgreSQL of a test's own: a cluster in a temporary folder, reached through a socket file there, that can be killed."""

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psycopg

from tests.support.broker import wait_until

USER: Final = "postgres"
"""Who runs it when the test is root, which PostgreSQL refuses to be."""
MAX_PREPARED: Final = 64
START_DEADLINE_S: Final = 120.0
_DEBIAN: Final = Path("/usr/lib/postgresql")
_SETTINGS: Final = {
    "listen_addresses": "",
    "max_prepared_transactions": MAX_PREPARED,
    "max_connections": 50,
    "shared_buffers": "16MB",
    # kills leave the page cache alone, so nothing is to be gained from syncing
    "fsync": "off",
    "autovacuum": "off",
}


def program(name: str) -> str:
    """A program of the newest version that is installed; Debian keeps most of them off the PATH."""
    found = sorted(_DEBIAN.glob(f"*/bin/{name}"), key=lambda path: int(path.parts[-3]))
    path = str(found[-1]) if found else shutil.which(name)
    assert path is not None, f"{name} is missing: apt-get install postgresql"
    return path


class Postgres:
    """Runs from entering the ``with`` block until leaving it, which removes everything."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="metaq-pg-"))  # short: it holds a socket
        self._data = self.folder / "data"
        self._log = self.folder / "log"
        self._user = USER if os.geteuid() == 0 else None
        if self._user is not None:
            owner = pwd.getpwnam(USER)
            os.chown(self.folder, owner.pw_uid, owner.pw_gid)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            initdb = [
                program("initdb"),
                "-D",
                str(self._data),
                "-A",
                "trust",
                "-U",
                USER,
                "-E",
                "UTF8",
                "--locale=C",
                "--no-sync",
            ]
            done = self._popen(initdb, subprocess.PIPE)
            output, _ = done.communicate(timeout=START_DEADLINE_S)
            assert done.returncode == 0, output.decode(errors="replace")
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _popen(self, command: list[str], output: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env={"PATH": os.defpath, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            user=self._user,
            group=self._user,
        )

    @property
    def url(self) -> str:
        """For SQLAlchemy."""
        return f"postgresql+psycopg://{USER}@/postgres?host={self.folder}"

    def connect(self) -> psycopg.Connection:
        """A new connection, each statement a transaction of its own."""
        return psycopg.connect(host=str(self.folder), user=USER, dbname="postgres", autocommit=True)

    def start(self) -> None:
        """Start, recover what a kill left, and wait until it serves."""
        settings = {**_SETTINGS, "unix_socket_directories": self.folder}
        command = [program("postgres"), "-D", str(self._data)]
        command += [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        with self._log.open("ab") as log:
            self._process = self._popen(command, log.fileno())
        wait_until(self._ready_or_ended, START_DEADLINE_S, f"PostgreSQL is ready; see {self._log}")
        assert self.running, self._log.read_text("utf-8", errors="replace")[-4000:]

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _ready_or_ended(self) -> bool:
        if not self.running:
            return True
        try:
            self.connect().close()
        except psycopg.OperationalError:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL the postmaster and every process that it has started, and wait for their end."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGSTOP)  # from here on it starts no more
        wait_until(lambda: _state(process.pid) in "TZ", START_DEADLINE_S, f"process {process.pid} is stopped")
        children = _children(process.pid)
        for pid in (process.pid, *children):
            with contextlib.suppress(ProcessLookupError):  # a child may have ended by itself
                os.kill(pid, signal.SIGKILL)
        process.wait()
        wait_until(lambda: all(_state(pid) == "Z" for pid in children), START_DEADLINE_S, f"the processes {children} are gone")

    def close(self) -> None:
        """Kill it and remove the folder."""
        self.kill()
        shutil.rmtree(self.folder)


def _children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text("ascii").split()]


def _state(pid: int) -> str:
    """Return the state letter of a process; one that is gone counts as Z (ended, but not yet waited for)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"
