"""One machine, over SSH: its commands and files. Only this module knows fabric.

An unknown host key is refused, also that of a jump host: ``ssh`` to the host once, or name a ``known_hosts`` file.
"""

import json
import logging
import shlex
from pathlib import Path
from typing import Any, Final

from fabric import Connection
from invoke.exceptions import CommandTimedOut
from paramiko import RejectPolicy, SSHException

from metaq.deploy.cluster import Host, normal_folder
from metaq.errors import DeployFailed

CONNECT_S: Final = 10
COMMAND_S: Final = 900
PROBE: Final = Path(__file__).with_name("probe.py")


class Machine:
    """A connection for commands on one host. Every failure is a ``DeployFailed`` that begins with the host's name."""

    def __init__(self, host: Host) -> None:
        """Prepare the connection, which opens at the first command."""
        self.host = host
        self.folder = normal_folder(host.settings.folder)
        # paramiko also logs the errors that it raises
        logging.getLogger("paramiko").setLevel(logging.CRITICAL)
        settings = host.settings
        keys = {"key_filename": settings.ssh_key} if settings.ssh_key else {}
        self._connection = Connection(
            settings.address, settings.ssh_user, settings.ssh_port, connect_timeout=CONNECT_S, connect_kwargs=keys
        )
        link = self._connection
        while isinstance(link, Connection):  # the machine, and every jump host (ProxyJump) before it
            try:
                link.client.load_system_host_keys(settings.known_hosts or None)
            except OSError as error:
                raise self.fail(f"known_hosts: {error}") from error
            link.client.set_missing_host_key_policy(RejectPolicy())
            link = link.gateway

    def __str__(self) -> str:
        return self.host.name

    def fail(self, reason: object) -> DeployFailed:
        """Return the error to raise for this host."""
        return DeployFailed(f"{self.host.name}: {reason}")

    def run(self, command: str, *, what: str = "", deadline_s: float = COMMAND_S) -> str:
        """Return the standard output of a shell command; ``DeployFailed`` when it fails. ``what`` names it in that error."""
        code, output, errors = self.attempt(command, deadline_s=deadline_s)
        if code:
            said = (errors.strip() or output.strip() or "it said nothing").splitlines()
            raise self.fail(f"{what or command.split(maxsplit=1)[0]} failed with exit code {code}: {' / '.join(said[-3:])}")
        return output

    def attempt(self, command: str, *, deadline_s: float = COMMAND_S) -> tuple[int, str, str]:
        """Return exit code, standard output and error of a shell command.

        ``DeployFailed`` only without SSH, or when it takes longer than ``deadline_s``.
        """
        try:
            done = self._connection.run(command, hide=True, warn=True, in_stream=False, timeout=deadline_s)
        except CommandTimedOut as error:
            raise self.fail(f"{command.split(maxsplit=1)[0]} did not end within {deadline_s:.0f} s") from error
        except (SSHException, OSError, EOFError) as error:
            raise self.fail(self._unreachable(error)) from error
        return done.exited, done.stdout, done.stderr

    def upload(self, local: Path, remote: str) -> None:
        """Copy one file to the machine."""
        try:
            self._connection.put(str(local), remote)
        except (SSHException, OSError, EOFError) as error:
            raise self.fail(f"cannot write {remote}: {error}") from error

    def probe(self, questions: dict[str, Any]) -> dict[str, Any]:
        """Return facts about the machine (``metaq.deploy.probe``). ``DeployFailed`` when it has no Python that runs."""
        words = (self.host.settings.python, "-c", PROBE.read_text("utf-8"), json.dumps(questions))
        code, output, errors = self.attempt(shlex.join(words))
        if code in (126, 127):
            raise self.fail(
                f"no Python: {self.host.settings.python} cannot be run; install Python 3.11 or newer, or set python"
            )
        if code:
            raise self.fail(f"cannot examine it: {errors.strip()[-300:]}")
        facts: dict[str, Any] = json.loads(output.splitlines()[-1])
        return facts

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _unreachable(self, error: Exception) -> str:
        settings = self.host.settings
        where = f"{settings.ssh_user}@{settings.address}:{settings.ssh_port}"
        return f"no SSH to {where}: {error or type(error).__name__}"
