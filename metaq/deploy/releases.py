"""Releases on one machine.

::

    FOLDER/
      releases/0.1.0-1f3c…/
        venv/               an environment with metaq, made from wheels without any package index
        conf/broker.yaml    what cluster.yaml says of this host
        complete            written last: what has none is a leftover, and is made anew
      current               → releases/0.1.0-1f3c…, switched by a rename
      supervisor/  log/     where there is no systemd
"""

import shlex
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from metaq.deploy.machine import Machine
from metaq.deploy.wheels import Release, bundle
from metaq.errors import DeployFailed

ENVIRONMENT: Final = """\
set -e
umask 022
if [ ! -e {home}/complete ]; then
    rm -rf {home}/venv
    mkdir -p {home}
    {python} -m venv --without-pip {home}/venv
    {python} "$(ls {wheels}/pip-*.whl)/pip" --python {home}/venv/bin/python --quiet --disable-pip-version-check \\
        install --no-cache-dir --no-index --find-links {wheels} {packages}
    touch {home}/complete
fi
"""


class Releases:
    """Those of one machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._folder = machine.folder

    def install(self, release: Release, *, supervisor: bool) -> None:
        """Upload and unpack a release, unless it is there; what runs is not touched. What fails is taken away again."""
        machine, home = self._machine, f"{self._folder}/releases/{release.name}"
        try:
            self._upload(release, home)
            self._make_environment(home, f"{home}/wheels", f"metaq-broker{release.extras}=={release.version}")
            if supervisor:
                self._make_environment(f"{self._folder}/supervisor", f"{home}/wheels", "supervisor")
            machine.run(f"rm -rf {home}/wheels {home}/bundle.tar")
        except DeployFailed:
            machine.attempt(f"rm -rf {home}; [ -e {self._folder}/supervisor/complete ] || rm -rf {self._folder}/supervisor")
            raise
        self._make_data_folders()

    def _upload(self, release: Release, home: str) -> None:
        machine = self._machine
        owner = machine.host.settings.user
        with tempfile.TemporaryDirectory(prefix="metaq-deploy-") as name:
            configuration = Path(name) / "conf"
            configuration.mkdir()
            for service in machine.host.services:
                (configuration / f"{service.kind}.yaml").write_text(service.text(), "utf-8")
            bundle(release, configuration, Path(name) / "bundle.tar")
            machine.run(f"rm -rf {home} && mkdir -p {home}", what="making the release's folder")
            machine.upload(Path(name) / "bundle.tar", f"{home}/bundle.tar")
        machine.run(
            f"tar xf {home}/bundle.tar -C {home} --no-same-owner && chmod 600 {home}/conf/*", what="unpacking the release"
        )
        if owner:
            machine.run(f"chown {owner} {home}/conf/*")

    def _make_environment(self, home: str, wheels: str, packages: str) -> None:
        python = self._machine.host.settings.python
        script = ENVIRONMENT.format(home=home, wheels=wheels, python=python, packages=packages)
        self._machine.run(f"sh -c {shlex.quote(script)}", what=f"installing {packages}")

    def _make_data_folders(self) -> None:
        for service in self._machine.host.services:
            data, owner = shlex.quote(str(service.settings.data)), self._machine.host.settings.user
            self._machine.run(
                f"mkdir -p {data}" + (f" && chown {owner} {data}" if owner else ""), what="making the data folder"
            )

    def switch(self, name: str) -> None:
        """Make a release the current one, at once or not at all."""
        new = f"{self._folder}/current.new"
        self._machine.run(
            f"rm -f {new} && ln -s releases/{name} {new} && mv -T {new} {self._folder}/current", what=f"switching to {name}"
        )

    def mark_newest(self, name: str) -> None:
        """It was deployed now, whenever it was installed."""
        self._machine.run(f"touch {self._folder}/releases/{name}/complete")

    def prune(self, facts: Mapping[str, Any], current: str, keep: int) -> Sequence[str]:
        """Delete all but the newest ones; returns the names of those deleted."""
        others = [name for name in facts["releases"] if name != current]
        old = others[: max(0, len(others) - keep + 1)]
        for name in old:
            self._machine.run(f"rm -rf {self._folder}/releases/{name}", what=f"deleting {name}")
        return old
