"""This machine in place of one behind SSH, with a stub of systemd's commands."""

import os
import subprocess
from pathlib import Path
from typing import Any, Final

from metaq.deploy.cluster import Cluster, Host
from metaq.deploy.machine import COMMAND_S, Machine
from tests.support.fab import Fab

SYSTEMCTL: Final = """\
#!/bin/sh
echo "$*" >> {folder}/told
for unit; do :; done
case $1 in
    show) cat {folder}/$unit 2>/dev/null || printf 'ActiveState=inactive\\nSubState=dead\\nMainPID=0\\n' ;;
    start) printf 'ActiveState=active\\nSubState=running\\nMainPID=77\\n' > {folder}/$unit ;;
    stop) [ -e {folder}/$unit ] && rm {folder}/$unit ;;
esac
"""
JOURNALCTL: Final = """\
#!/bin/sh
echo "the journal: $*"
"""


class LocalMachine(Machine):
    """This one, without SSH: commands run in a shell, those of systemd are stubs in ``stubs``."""

    def __init__(self, host: Host, stubs: Path) -> None:
        super().__init__(host)
        self._stubs = stubs

    def attempt(self, command: str, *, deadline_s: float = COMMAND_S) -> tuple[int, str, str]:
        path = f"{self._stubs}:{os.environ['PATH']}"
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, env={"PATH": path})
        return done.returncode, done.stdout, done.stderr


class Systems:
    """A machine whose systemd is a stub; ``told`` is what that was told since the last call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.units = folder / "units"
        for name, text in (("systemctl", SYSTEMCTL), ("journalctl", JOURNALCTL)):
            stub = folder / "bin" / name
            stub.parent.mkdir(exist_ok=True)
            stub.write_text(text.format(folder=folder))
            stub.chmod(0o755)
        self.units.mkdir()

    def host(self, **others: Any) -> Host:
        """One with a broker and a registry, or with what is given."""
        services = {"broker": {"data": "/var/lib/metaq", "registries": "10.0.0.1:9876"}, "registry": {"data": "/srv/registry"}}
        fab = Fab(self.folder / "cluster.yaml")
        fab.configure({"a": {"address": "10.0.0.1", "user": "metaq", **services, **others}})
        return Cluster.read(fab.file).hosts[0]

    def machine(self, host: Host) -> LocalMachine:
        """It."""
        return LocalMachine(host, self.folder / "bin")

    def told(self) -> list[str]:
        file = self.folder / "told"
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return [line for line in lines if not line.startswith("show")]
