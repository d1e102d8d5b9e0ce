"""A release: wheels of metaq and all its dependencies, built once on the deploying machine, so all hosts get the same.

Its name is VERSION-DIGEST. The digest covers the contents of the wheels, the configuration of all hosts, and the Python, user
and process manager there. So deploying the same again changes nothing, and a rollback takes the configuration back, too.
"""

import hashlib
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Final, NamedTuple

from metaq.deploy.cluster import Cluster
from metaq.errors import DeployFailed

BUILD_S: Final = 900
BESIDE: Final = ("pip", "supervisor")
"""Hosts need no pip of their own; where there is no systemd, supervisor manages the processes."""

STORE: Final = "metaq/store/recovery/recovery.py"
FORMAT: Final = re.compile(r"^FORMAT_VERSION: Final = (\d+)$", re.MULTILINE)
FEATURES: Final = re.compile(r"^FEATURES: Final = frozenset\((.*?)\)$", re.MULTILINE | re.DOTALL)


class Release(NamedTuple):
    """A release to deploy."""

    name: str
    version: str
    extras: str
    format: int
    """The version of the data format that it reads and writes."""
    features: tuple[str, ...]
    """The features that data may have for it to read them, sorted."""
    wheels: Path
    """The folder that holds its wheels."""

    def size(self) -> int:
        """Return the bytes of its wheels."""
        return sum(wheel.stat().st_size for wheel in self.wheels.glob("*.whl"))

    def unpacked(self) -> int:
        """Return the bytes of the files in its wheels."""
        total = 0
        for wheel in self.wheels.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                total += sum(member.file_size for member in archive.infolist())
        return total


def build(cluster: Cluster, into: Path) -> Release:
    """Build the wheels, unless ``package`` is a folder that has them. ``DeployFailed`` has pip's message."""
    package = cluster.settings.package
    wheels = Path(package)
    if not any(wheels.glob("*.whl")):
        wheels = into / "wheels"
        wheels.mkdir()
        source = package if not Path(package).is_dir() else str(Path(package).resolve())
        extras = f"metaq-broker{cluster.extras}"  # of the package, however it is named: nothing fits after a version
        _pip(into, "wheel", "--wheel-dir", str(wheels), source, extras, *BESIDE)
    own = sorted(wheels.glob("metaq_broker-*.whl"))
    if len(own) != 1:
        raise DeployFailed(f"package: there are {len(own)} wheels of metaq-broker in {wheels}; there must be one")
    version = own[0].name.split("-")[1]
    return Release(f"{version}-{_digest(wheels, cluster)[:10]}", version, cluster.extras, *_reads(own[0]), wheels)


def bundle(release: Release, configuration: Path, file: Path) -> None:
    """Pack the wheels, and the folder with the configuration of one host, into one file to upload."""
    with tarfile.open(file, "w") as archive:
        archive.add(release.wheels, "wheels")
        archive.add(configuration, "conf")


def _pip(folder: Path, *arguments: str) -> None:
    """Run pip, with ``folder`` for the temporary files of setuptools.

    Any that it left in a source tree would get into the next wheel.
    """
    extra = folder / "setup.cfg"
    extra.write_text(f"[build]\nbuild_base={folder}\n[egg_info]\negg_base={folder}\n")
    environment = {**os.environ, "DIST_EXTRA_CONFIG": str(extra)}
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, check=False, env=environment)  # noqa: S603 - our own words
    if done.returncode:
        raise DeployFailed(f"package: the wheels cannot be made here: {done.stderr.strip()[-1000:]}")


def _reads(wheel: Path) -> tuple[int, tuple[str, ...]]:
    """Return the version of the wheel's store format, and the features of data that it knows; early versions know none.

    These are read from the source, not imported, as the wheel may be of another version than this one.
    """
    with zipfile.ZipFile(wheel) as archive:
        source = archive.read(STORE).decode() if STORE in archive.namelist() else ""
    found = FORMAT.search(source)
    if found is None:
        raise DeployFailed(f"package: {wheel.name} does not say which data format it reads; {STORE} should")
    features = FEATURES.search(source)
    return int(found[1]), tuple(sorted(re.findall(r'"(.+?)"', features[1]))) if features else ()


def _digest(wheels: Path, cluster: Cluster) -> str:
    """Return a digest of names and checksums of the files in the wheels, and of the hosts' configuration.

    Wheels built again from the same source have other times in them, and so other bytes.
    """
    digest = hashlib.sha256()
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for member in sorted(archive.infolist(), key=lambda member: member.filename):
                digest.update(f"{wheel.name} {member.filename} {member.CRC}\n".encode())
    for host in cluster.hosts:
        settings = host.settings
        digest.update(f"{host.name} {settings.user} {settings.python} {settings.processes}\n".encode())
        for service in host.services:
            digest.update(f"{service}\n{service.text()}".encode())
    return digest.hexdigest()
