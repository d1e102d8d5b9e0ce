"""Releases on one machine.

::

    FOLDER/
      releases/0.1.0-1f3c…/
        venv/               an environment with metaq, made from wheels without any package index
        conf/broker.yaml    what cluster.yaml says of this host
        complete            written last: what data it reads, and fab's user; a folder without it is a leftover, made anew
      current               → releases/0.1.0-1f3c…, switched by a rename
      previous              → the release that ran everywhere before it, for a rollback
      supervisor/  log/     where there is no systemd
"""

import json
import shlex
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from metaq.deploy.cluster import Service
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
    {home}/venv/bin/{program} --version >/dev/null
    printf %s {about} > {home}/complete
fi
"""


def _about(release: Release, admin: str) -> str:
    return json.dumps({"format": release.format, "features": release.features, "admin": admin})


class Releases:
    """The releases on one machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._folder = machine.folder

    def install(self, release: Release, admin: str, *, supervisor: bool) -> None:
        """Upload and unpack a release, unless it is there. Running services are not touched; a failed release is removed."""
        machine, home = self._machine, f"{self._folder}/releases/{release.name}"
        try:
            self._upload(release, home)
            if supervisor:  # first: a release that is complete is not installed again
                self._make_environment(
                    f"{self._folder}/supervisor", f"{home}/wheels", "supervisor", "supervisord", "supervisor"
                )
            package = f"metaq-broker{release.extras}=={release.version}"
            self._make_environment(home, f"{home}/wheels", package, "metaq", _about(release, admin))
            machine.run(f"rm -rf {home}/wheels {home}/bundle.tar")
        except DeployFailed:
            machine.attempt(f"rm -rf {home}; [ -e {self._folder}/supervisor/complete ] || rm -rf {self._folder}/supervisor")
            raise

    def _upload(self, release: Release, home: str) -> None:
        machine = self._machine
        owner = machine.host.settings.user
        with tempfile.TemporaryDirectory(prefix="metaq-deploy-") as name:
            configuration = Path(name) / "conf"
            configuration.mkdir()
            for service in machine.host.services:
                (configuration / f"{service.kind}.yaml").write_text(service.text(), "utf-8")
            bundle(release, configuration, Path(name) / "bundle.tar")
            machine.run(f"umask 022 && rm -rf {home} && mkdir -p {home}", what="making the release's folder")
            machine.upload(Path(name) / "bundle.tar", f"{home}/bundle.tar")
        machine.run(
            f"umask 022 && cd {home} && tar xf bundle.tar --no-same-owner && chmod 755 conf && chmod 600 conf/*",
            what="unpacking the release",
        )
        if owner:
            machine.run(f"chown {owner} {home}/conf/*")

    def _make_environment(self, home: str, wheels: str, packages: str, program: str, about: str) -> None:
        python = self._machine.host.settings.python
        script = ENVIRONMENT.format(
            home=home, wheels=wheels, python=python, packages=packages, program=program, about=shlex.quote(about)
        )
        self._machine.run(f"sh -c {shlex.quote(script)}", what=f"installing {packages}")

    def make_data_folders(self, services: Sequence[Service]) -> None:
        """Make the data folders that do not exist yet; other users can read neither them nor the files in them."""
        owner = self._machine.host.settings.user
        for service in services:
            data = service.settings.data
            own = f" && chown {owner} {data}" if owner else ""
            make = f"umask 022 && mkdir -p {data} && chmod 750 {data}"
            self._machine.run(f"{{ [ -d {data} ] || {{ {make}; }}; }}{own}", what="making the data folder")

    def of(self, pid: int) -> str:
        """Return the release whose Python a process runs; empty for another process, and for one that has ended."""
        code, words, _ = self._machine.attempt(f"cat /proc/{pid}/cmdline")
        before, _, rest = words.partition(f"{self._folder}/releases/")
        # a slash before it is of a folder that was written with two
        return rest.partition("/")[0] if code == 0 and not before.strip("/") else ""

    def switch(self, name: str) -> None:
        """Make a release the current one, at once or not at all."""
        self._link("current", name)

    def remember(self, name: str) -> None:
        """Make a release the one that a rollback goes to."""
        self._link("previous", name)

    def forget(self) -> None:
        """Leave no release for a rollback to go to."""
        self._machine.run(f"rm -f {self._folder}/previous")

    def _link(self, link: str, name: str) -> None:
        new = f"{self._folder}/{link}.new"
        self._machine.run(
            f"rm -f {new} && ln -s releases/{name} {new} && mv -T {new} {self._folder}/{link}", what=f"making {name} {link}"
        )

    def mark_newest(self, release: Release, admin: str) -> None:
        """Record that a release was deployed now, whenever it was installed."""
        complete = f"{self._folder}/releases/{release.name}/complete"
        self._machine.run(f"printf %s {shlex.quote(_about(release, admin))} > {complete}.new && mv {complete}.new {complete}")

    def prune(self, known: Sequence[str], used: Collection[str], keep: int) -> Sequence[str]:
        """Delete the oldest releases beyond ``keep``, except those in use. Return the names of those deleted.

        ``known``: all that were there, the oldest first.
        """
        spare = [name for name in known if name not in used]
        old = spare[: max(0, len(spare) + len(used) - keep)]
        for name in old:
            self._machine.run(f"rm -rf {self._folder}/releases/{name}", what=f"deleting {name}")
        return old
