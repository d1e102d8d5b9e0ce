"""Keep what a version leaves behind, for the tests of later ones: python -m tests.upgrade.keep COMMIT

Runs the broker and the client of COMMIT, a tag or a hash, from git's history, with the packages that are installed here. Writes
tests/upgrade/golden/COMMIT.tar.xz: a store that was stopped, the same store as a kill leaves it, the modules of the client, and
what ``fill`` says must be found. That broker's clock begins at 2020, so that all its times are past wherever a test opens the
store. A test that asked git for the commit would need the whole history, which CI does not fetch.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.docs.examples import ROOT
from tests.support.broker import wait_until

GOLDEN: Final = Path(__file__).parent / "golden"
BEGIN_S: Final = 1_577_836_800
"""2020-01-01."""
SMALL: Final = {
    "--segment-bytes": "262144",
    "--max-body-bytes": "65536",
    "--queue-file-bytes": "3200",
    "--index-slots": "5000",
    "--index-entries": "20000",
    "--max-delay-ms": "0",
    "--offset-export-interval-ms": "0",
    "--ample-free-bytes": "0",
}
"""Settings of a store that is written to a repository, each with its value. It is opened by the same."""
DELAY_MS: Final = 3_600_000
LEVEL: Final = 18
BROKER: Final = """
import runpy, sys, time
real, begin, start = time.time_ns, int(sys.argv.pop(1)) * 10**9, time.time_ns()
time.time_ns = lambda: real() - start + begin
time.time = lambda: time.time_ns() / 1e9
runpy.run_module("metaq", run_name="__main__", alter_sys=True)
"""
CLIENT: Final = """
import pathlib, shutil, sys
import metaq
for name in metaq.__all__:
    if name not in {"aio", "testing"}:
        getattr(metaq, name)
import metaq.client.xa
source, to = map(pathlib.Path, sys.argv[1:])
for module in list(sys.modules.values()):
    file = pathlib.Path(getattr(module, "__file__", None) or "/")
    if file.is_relative_to(source):
        (to / file.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, to / file.relative_to(source))
"""
READY: Final = re.compile(r"^metaq ready listen=(\S+) .*?registry=(\S+)", re.MULTILINE)


def environment(source: Path) -> dict[str, str]:
    """In which ``import metaq`` finds the modules in ``source``."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("METAQ_")}
    return {**clean, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}


def fill(source: Path, registry: str, address: str, delay_ms: int, level: int, folder: Path) -> str:
    """Run ``fill`` with the client in ``source``; return what it prints."""
    program = Path(__file__).with_name("fill.py")
    command = [sys.executable, "-P", str(program), registry, address, str(delay_ms), str(level)]
    done = subprocess.run(
        command, cwd=folder, env=environment(source), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def keep(commit: str, folder: Path) -> Path:
    """Write the archive of a commit; return its name. ``folder`` is empty, for what is made on the way."""
    source, kept, data = folder / "source", folder / "kept", folder / "data"
    source.mkdir()
    kept.mkdir()
    archive = subprocess.run(["git", "archive", commit, "metaq"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-xC", str(source)], input=archive, check=True)
    flags = [word for pair in SMALL.items() for word in pair]
    ports = [word for name in ("listen", "registry-listen", "http-listen") for word in (f"--{name}", "127.0.0.1:0")]
    command = [sys.executable, "-P", "-c", BROKER, str(BEGIN_S), "serve", "--data", str(data), *ports, *flags]
    command += ["--remoting-listen", "none"]
    out = folder / "out"
    with out.open("wb") as output:
        broker = subprocess.Popen(command, cwd=folder, env=environment(source), stdout=output, stderr=output)
    try:
        wait_until(lambda: bool(READY.search(out.read_text())) or broker.poll() is not None, 60, "it serves")
        ready = READY.search(out.read_text())
        assert ready is not None, out.read_text()
        expected = json.loads(fill(source, ready[2], ready[1], DELAY_MS, LEVEL, folder))
        del expected["file"]
        (kept / "expected.json").write_text(json.dumps(expected))
        broker.send_signal(signal.SIGSTOP)
        shutil.copytree(data, kept / "killed")
        broker.send_signal(signal.SIGCONT)
        broker.terminate()
        assert broker.wait(60) == 0, out.read_text()
    finally:
        broker.kill()
        broker.wait()
    data.rename(kept / "stopped")
    subprocess.run(
        [sys.executable, "-P", "-c", CLIENT, str(source), str(kept / "client")], env=environment(source), cwd=folder, check=True
    )
    name = GOLDEN / f"{commit}.tar.xz"
    GOLDEN.mkdir(exist_ok=True)
    words = ["tar", "--sort=name", "--owner=0", "--group=0", "--sparse", "-cf", str(folder / "kept.tar"), "-C", str(kept), "."]
    subprocess.run(words, check=True)
    with name.open("wb") as file:
        subprocess.run(["xz", "-9e", "-c", str(folder / "kept.tar")], stdout=file, check=True)
    return name


def main(commit: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(keep(commit, Path(folder)))


if __name__ == "__main__":
    main(*sys.argv[1:])
