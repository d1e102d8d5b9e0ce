"""The distribution as a user gets it: built from the tracked files, installed in an environment of its own.

``python -m tests.packaging.built`` puts the compiled modules of the wheel beside their sources: from then on every command uses
them, until ``make interpret``.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from tests.docs.examples import ROOT
from tests.support.broker import wait_until
from tests.support.once import made_in

DEADLINE_S: Final = 1200.0
"""For one command, on a machine that does much else: alone, a build takes two minutes."""
READY: Final = re.compile(
    r"^metaq ready listen=(\S+) remoting=(\S+) registry=(\S+) data=data pid=(\d+)(?: http=\S+ console=\S+)?$", re.MULTILINE
)
COMPILED: Final = ROOT / "build" / "compiled"
MOST_KIB: Final = 52_000_000 // 1024
"""P15: resident when it has taken its first message, compiled. The extension is 5 MB of it."""
NO_PORTS: Final = dict.fromkeys(
    ("METAQ_LISTEN", "METAQ_REMOTING_LISTEN", "METAQ_REGISTRY_LISTEN", "METAQ_HTTP_LISTEN"), "127.0.0.1:0"
)
"""The only thing that a test changes: the ports of a broker that may run on this machine already."""
PIP_INSTALL: Final = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")


class Serving(NamedTuple):
    """A broker of the installed command."""

    address: str
    pid: int
    process: "subprocess.Popen[bytes]"

    def resident_kib(self) -> int:
        """VmRSS."""
        found = re.search(r"^VmRSS:\s+(\d+) kB$", Path(f"/proc/{self.pid}/status").read_text("ascii"), re.MULTILINE)
        assert found is not None
        return int(found[1])


def clean_environment(**more: str) -> dict[str, str]:
    """This one's, without metaq's settings and without what leads Python to this project."""
    ours = ("METAQ_", "PYTHON", "VIRTUAL_ENV", "COMPILE_METAQ")
    return {**{name: value for name, value in os.environ.items() if not name.startswith(ours)}, **more}


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Standard output; an error has both."""
    environ, words = clean_environment(**environment), list(map(str, command))
    done = subprocess.run(words, cwd=cwd, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def tracked() -> list[str]:
    """The tracked files of this project that are there."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in listing.split("\0") if name and (ROOT / name).is_file()]


def sources() -> list[str]:
    """Those of them that a distribution may take."""
    return [name for name in tracked() if not name.startswith(("tests/", "benchmarks/"))]


def copy(names: Iterable[str], to: Path) -> Path:
    """Files of this project: what else lies about in a work tree must not get into a distribution."""
    for name in names:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, to / name)
    return to


def build(folder: Path, **environment: str) -> tuple[Path, Path]:
    """The sdist, and the wheel that is made of it."""
    source = copy(sources(), folder / "source")
    run(sys.executable, "-m", "build", "--outdir", folder / "dist", source, cwd=folder, **environment)
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    return sdist, wheel_in(folder / "dist")


def build_compiled() -> tuple[Path, Path]:
    """The same, compiled. That takes minutes, so it is kept until a source changes or ``make interpret`` removes it."""
    digest = hashlib.sha256()
    for name in sources():
        digest.update(f"{name} {hashlib.sha256((ROOT / name).read_bytes()).hexdigest()}\n".encode())
    folder = made_in(COMPILED / digest.hexdigest()[:16], _build_compiled)
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    return sdist, wheel_in(folder / "dist")


def _build_compiled(folder: Path) -> None:
    build(folder, COMPILE_METAQ="1")


def wheel_in(folder: Path) -> Path:
    """The only wheel in a folder."""
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, environment: Path) -> Path:
    """An environment of its own with the wheel and what that needs, from pip's cache if it is there; its folder of commands."""
    venv.create(environment, with_pip=True)
    binaries = environment / "bin"
    run(binaries / "python", *PIP_INSTALL, wheel, cwd=environment)
    return binaries


def install_bare(wheel: Path, environment: Path, path: str) -> Path:
    """The same where PATH is ``path``. pip's cache may have a crcmod that was compiled, so that is built again."""
    venv.create(environment, with_pip=True)
    binaries = environment / "bin"
    run(binaries / "python", *PIP_INSTALL, "--no-cache-dir", "crcmod", cwd=environment, PATH=path)
    run(binaries / "python", *PIP_INSTALL, wheel, cwd=environment, PATH=path)
    return binaries


@contextmanager
def serving(binaries: Path, folder: Path) -> Iterator[Serving]:
    """``metaq serve`` with no configuration, in an empty folder."""
    folder.mkdir()
    out, err = folder / "out", folder / "err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        command = [str(binaries / "metaq"), "serve"]
        process = subprocess.Popen(command, cwd=folder, env=clean_environment(**NO_PORTS), stdout=stdout, stderr=stderr)
    try:
        wait_until(lambda: bool(READY.search(out.read_text())) or process.poll() is not None, DEADLINE_S, "it serves")
        ready = READY.search(out.read_text())
        assert ready is not None, err.read_text()
        yield Serving(ready[1], int(ready[4]), process)
    finally:
        process.kill()
        process.wait()


def main() -> None:
    _, wheel = build_compiled()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(ROOT, [name for name in archive.namelist() if name.endswith(".so")])


if __name__ == "__main__":
    main()
