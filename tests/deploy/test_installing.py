"""The installation of a release, interrupted at any step; on this machine, without SSH, pip and real packages."""

import shutil
from pathlib import Path
from typing import Final

from metaq.deploy.machine import COMMAND_S
from metaq.deploy.releases import Releases
from metaq.deploy.wheels import Release
from tests.deploy.systems import LocalMachine, Systems

NAME: Final = "0.1.0-1"
PYTHON: Final = """\
#!/bin/sh
case "$*" in
    *" venv "*)
        for home; do :; done
        mkdir -p $home/bin && ln -s /bin/true $home/bin/metaq && ln -s /bin/true $home/bin/supervisord
esac
"""


class Interrupted(LocalMachine):
    """A machine that a person stops waiting for with Ctrl-C, after some commands."""

    commands_left = 0

    def run(self, command: str, *, what: str = "", deadline_s: float = COMMAND_S) -> str:
        if not self.commands_left:
            raise KeyboardInterrupt
        self.commands_left -= 1
        return super().run(command, what=what, deadline_s=deadline_s)

    def upload(self, local: Path, remote: str) -> None:
        shutil.copy(local, remote)


def test_a_release_that_is_complete_has_all_it_needs(systems: Systems, tmp_path: Path) -> None:
    """E-18: wherever the first deployment was interrupted, as a repeat installs only what is not complete."""
    python, wheels, home = tmp_path / "python", tmp_path / "wheels", tmp_path / "metaq"
    python.write_text(PYTHON)
    python.chmod(0o755)
    wheels.mkdir()
    (wheels / "pip-1.whl").touch()
    release = Release(NAME, "0.1.0", "", 1, (), wheels)
    host = systems.host(folder=str(home), python=str(python), broker={"data": "/var/lib/metaq"}, registry=None, user="")
    steps = 0
    while True:
        machine = Interrupted(host, tmp_path / "bin")
        machine.commands_left = steps
        try:
            Releases(machine).install(release, "", supervisor=True)
        except KeyboardInterrupt:
            complete = (home / "releases" / NAME / "complete").exists()
            assert not complete or (home / "supervisor" / "complete").exists(), f"after {steps} commands"
            steps += 1
            shutil.rmtree(home, ignore_errors=True)
        else:
            break
    assert steps > 3 and (home / "releases" / NAME / "complete").exists() and (home / "supervisor" / "complete").exists()
