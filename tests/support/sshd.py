"""Real sshd processes on loopback, each of which stands for a machine, with keys of their own."""

import getpass
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from tests.support.broker import wait_until
from tests.support.ports import free_ports

START_DEADLINE_S: Final = 60.0
STOP_DEADLINE_S: Final = 60.0
CONFIGURATION: Final = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
Subsystem sftp internal-sftp
SetEnv HOME={home} PATH={path}
"""
PATH: Final = f"{Path(sys.executable).parent}:/usr/bin:/bin"
"""Of every command. The shell of who runs the tests may take long to set up another one."""


def make_key(file: Path) -> None:
    """A key pair without a passphrase."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(file)], check=True)


class SshHost:
    """One machine, from entering the ``with`` block until leaving it: an sshd, and ``home``, where its files are.

    ``python`` is its interpreter for what is deployed.
    """

    def __init__(self, folder: Path, name: str, python: Path = Path("python3")) -> None:
        self.name = name
        self._python = python
        self.home = folder / name
        self.home.mkdir(parents=True)
        (self.port,) = free_ports(1)
        self._ssh = folder / f"{name}.ssh"
        self._ssh.mkdir()
        self._process: subprocess.Popen[bytes] | None = None
        make_key(self._ssh / "host_key")
        make_key(self._ssh / "key")
        kind, key, *_ = (self._ssh / "host_key.pub").read_text().split()
        (self._ssh / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {kind} {key}\n")
        (self._ssh / "sshd_config").write_text(
            CONFIGURATION.format(port=self.port, folder=self._ssh, home=self.home, path=PATH)
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end_services()
        self.stop()

    def start(self) -> None:
        """Start sshd, and wait until it takes connections."""
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        program = shutil.which("sshd") or "/usr/sbin/sshd"
        with (self._ssh / "log").open("ab") as log:
            command = [program, "-D", "-e", "-f", str(self._ssh / "sshd_config")]
            # nothing that is deployed may depend on who logs in
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, umask=0o077)
        wait_until(self._answers, START_DEADLINE_S, f"sshd answers; see {self._ssh / 'log'}")

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as link:
                return link.recv(4) == b"SSH-"
        except OSError:
            return False

    def stop(self) -> None:
        """The machine cannot be reached any more; its services run on."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(STOP_DEADLINE_S)

    def supervisor(self, *words: str) -> str:
        """Return what ``supervisorctl`` of this host prints."""
        home = self.home / "metaq" / "supervisor"
        command = [str(home / "venv" / "bin" / "supervisorctl"), "-c", str(home / "supervisord.conf"), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    def end_services(self) -> None:
        """Stop everything that was deployed there, and what looks after it."""
        pid = self.home / "metaq" / "supervisor" / "supervisord.pid"
        if pid.exists():
            self.supervisor("shutdown")
            wait_until(lambda: not pid.exists(), STOP_DEADLINE_S, f"supervisord ends; see {pid.parent}")

    def settings(self, **others: Any) -> dict[str, Any]:
        """Its lines in cluster.yaml."""
        return {
            "address": "127.0.0.1",
            "ssh_port": self.port,
            "ssh_user": getpass.getuser(),
            "ssh_key": str(self._ssh / "key"),
            "known_hosts": str(self._ssh / "known_hosts"),
            "folder": str(self.home / "metaq"),
            "processes": "supervisor",
            "python": str(self._python),
            **others,
        }
