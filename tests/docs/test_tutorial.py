"""The tutorial, from nothing, as a new user plays it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.docs.examples import ROOT, Fence, fences
from tests.docs.shell import Shell
from tests.packaging.built import copy, run, sources, wheel_in
from tests.support.jvms import short_lived
from tests.support.ports import free_ports

PAGE: Final = "docs/tutorial.md"
MOST_SECONDS: Final = 600.0
PACKAGE: Final = "metaq-broker"
SPARK: Final = "## Spark"
PORTS: Final = {"8123": "METAQ_LISTEN", "9876": "METAQ_REGISTRY_LISTEN", "10911": "METAQ_REMOTING_LISTEN"}
VIP: Final = 2
"""How far below the port of RocketMQ's clients a broker takes another one for them."""
PIPS: Final = ("PIP_", "SSL_", "HTTP_", "HTTPS_", "http_", "https_", "no_proxy", "NO_PROXY", "REQUESTS_")
"""What tells pip how this machine reaches packages; nothing else of the environment goes along."""


def parts() -> tuple[list[Fence], list[Fence]]:
    """The fences before the part with Spark, and those of it."""
    text = (ROOT / PAGE).read_text("utf-8")
    line = text.count("\n", 0, text.index(f"\n{SPARK}\n")) + 1
    found = fences(PAGE)
    before = [fence for fence in found if int(fence.place.rpartition(":")[2]) < line]
    return before, found[len(before) :]


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """The pure one of this tree."""
    source = copy(sources(), tmp_path / "source")
    run(
        sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path / "wheel",
        source, cwd=tmp_path, COMPILE_METAQ="0",
    )  # fmt: skip
    return wheel_in(tmp_path / "wheel")


class Place:
    """An empty home, ports that nobody else has, and the package of this tree: all in which a reader's machine differs."""

    def __init__(self, folder: Path, path: str, package: str) -> None:
        self.folder = folder
        folder.mkdir()
        listen, registry, *_, remoting = free_ports(len(PORTS) + VIP)
        addresses = {port: f"127.0.0.1:{free}" for port, free in zip(PORTS, (listen, registry, remoting), strict=True)}
        self._replacements = {f"127.0.0.1:{port}": address for port, address in addresses.items()} | {PACKAGE: package}
        self.environment = {
            **{name: value for name, value in os.environ.items() if name.startswith(PIPS)},
            **{setting: addresses[port] for port, setting in PORTS.items()},
            "METAQ_HTTP_LISTEN": "127.0.0.1:0",
            "METAQ_BROKER": addresses["8123"],
            "METAQ_REGISTRY": addresses["9876"],
            "HOME": str(folder),
            "LANG": "C.UTF-8",
            "PATH": path,
        }

    def replaced(self, text: str) -> str:
        for shown, real in self._replacements.items():
            text = text.replace(shown, real)
        return text

    def shell(self) -> Shell:
        return Shell(self.folder, self.environment, self.replaced)


def cache_of_pip() -> str:
    """Where pip keeps what it has once fetched: not a part of the reader's home, so that the test asks nobody twice."""
    command = [sys.executable, "-m", "pip", "cache", "dir"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.slow
@pytest.mark.partner("git")
@pytest.mark.timeout(1800)
def test_from_nothing_to_a_replayed_dead_letter(
    wheel: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Play every line, in an empty home, with nothing on the path but Python and the system's commands, in ten minutes."""
    path = f"{Path(sys.base_prefix, 'bin')}{os.pathsep}/usr/bin{os.pathsep}/bin"
    place = Place(tmp_path / "home", path, str(wheel))
    place.environment["PIP_CACHE_DIR"] = cache_of_pip()
    before, _ = parts()
    with place.shell() as shell:
        typed = shell.play(before)
    assert [one.line for one in typed if one.line.startswith("metaq dlq replay")]
    seconds = sum(one.seconds for one in typed)
    print(f"{seconds:6.1f} s  in all")
    record_property("tutorial_seconds", round(seconds, 1))
    assert seconds < MOST_SECONDS


@pytest.mark.slow
@pytest.mark.partner("java")
@pytest.mark.timeout(900)
def test_the_part_with_spark(tmp_path: Path) -> None:
    """Play it in the environment of the tests, which has Spark, over the orders that the page has sent by then."""
    before, spark = parts()
    place = Place(tmp_path / "home", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", PACKAGE)
    place.environment |= {name: os.environ[name] for name in ("JAVA_HOME",) if name in os.environ}
    place.environment |= short_lived()
    place.environment["SPARK_LOCAL_IP"] = "127.0.0.1"
    lines = [line for fence in before if fence.kind == "console" for line in fence.text.splitlines()]
    start = [line for line in lines if line.startswith(("$ metaq serve", "$ cat broker.log", "…metaq ready"))]
    orders = [line for line in lines if line.startswith("$ metaq message send orders")]
    assert len(start) == 3 and len(orders) == 3
    sent = [f"{line}\nsent …" for line in (*orders, orders[1])]
    with place.shell() as shell:
        shell.play([Fence(PAGE, "console", "\n".join([*start, *sent])), *spark])
